/* Functions of rows on a CPU. A row's bits depend on that row alone. See tape.c for kernels. */

#include "numbers.h"

enum { PART = 1024 }; /* numbers of a row that a thread takes at once */

/* The order of these is that of rows.py. */
typedef struct {
    const number *x; /* [rows, count], `stride` numbers apart */
    const void *weight; /* [count], float if `is_wide` */
    int64_t rows, count, stride;
    number *out; /* [rows, count] */
    int32_t is_wide;
    float eps;
} Norm;

typedef struct {
    const number *both; /* [rows, 2 count], the gates first, `stride` numbers apart */
    int64_t rows, count, stride;
    number *out; /* [rows, count] */
    int32_t gelu; /* whether the gates go through GELU, as tanh approximates it, not through SiLU */
} Gated;

typedef struct {
    number *sum;        /* [rows, count], `stride` numbers apart */
    const number *part; /* [rows, count], `part_stride` numbers apart, 0 for one row for all */
    int64_t rows, count, stride, part_stride;
} Sum;

/* Write the RMS norm of each row. */
void rms_norm(const Norm *own) {
#pragma omp for nowait
    for (int64_t t = 0; t < own->rows; t++)
        norm(
            own->x + t * own->stride, own->weight, own->is_wide, own->count, own->eps,
            own->out + t * own->count
        );
}

/* Write x / (1 + e^-z) * up for each gate x, with the quotient rounded. z is x for SiLU; GELU's
   0.5 x (1 + tanh(y)) is that with z = 2 y. */
void gated(const Gated *own) {
    const int gelu = own->gelu;
    int64_t count = own->count, parts = (count + PART - 1) / PART;
#pragma omp for nowait
    for (int64_t p = 0; p < own->rows * parts; p++) {
        int64_t t = p / parts, from = p % parts * PART;
        int64_t to = from + PART < count ? from + PART : count;
        const number *gate = own->both + t * own->stride, *up = gate + count;
        number *out = own->out + t * count;
#pragma omp simd
        for (int64_t i = from; i < to; i++) {
            float x = wide(gate[i]);
            float z = gelu ? 1.5957691216f * (x + 0.044715f * x * x * x) : x;
            float part = power(-fabsf(z));
            float quotient = x / (1 + part) * (z < 0 ? part : 1);
            out[i] = narrow(wide(narrow(quotient)) * wide(up[i]));
        }
    }
}

/* Add a part to each row of a sum. */
void add(const Sum *own) {
    int64_t count = own->count, parts = (count + PART - 1) / PART;
#pragma omp for nowait
    for (int64_t p = 0; p < own->rows * parts; p++) {
        int64_t t = p / parts, from = p % parts * PART;
        int64_t to = from + PART < count ? from + PART : count;
        number *sum = own->sum + t * own->stride;
        const number *part = own->part + t * own->part_stride;
#pragma omp simd
        for (int64_t i = from; i < to; i++) sum[i] = narrow(wide(sum[i]) + wide(part[i]));
    }
}
