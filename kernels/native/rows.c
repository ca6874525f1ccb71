/* Functions of rows on a CPU, each in one call: a step of few rows is as fast as its calls are few.

A row's bits depend on that row alone. */

#include "numbers.h"

enum { SHARED = 1 << 15 }; /* numbers from which on threads share them */

/* Write the RMS norm of each row. x, out: [rows, count]; x's rows are `stride` numbers apart. */
void rms_norm(
    const number *x, const void *weight, int is_wide, int64_t rows, int64_t count, int64_t stride,
    float eps, number *out, int threads
) {
#pragma omp parallel for num_threads(threads) if (rows * count >= SHARED)
    for (int64_t t = 0; t < rows; t++)
        norm(x + t * stride, weight, is_wide, count, eps, out + t * count);
}

/* Write silu(gate) * up, with silu rounded. both: [rows, 2 count], the gates first, its rows
   `stride` numbers apart; out: [rows, count]. */
void silu_mul(
    const number *both, int64_t rows, int64_t count, int64_t stride, number *out, int threads
) {
#pragma omp parallel for num_threads(threads) if (rows * count >= SHARED)
    for (int64_t t = 0; t < rows; t++) {
        const number *gate = both + t * stride, *up = gate + count;
#pragma omp simd
        for (int64_t i = 0; i < count; i++) {
            float x = wide(gate[i]), part = power(-fabsf(x));
            float silu = x / (1 + part) * (x < 0 ? part : 1);
            out[t * count + i] = narrow(wide(narrow(silu)) * wide(up[i]));
        }
    }
}
