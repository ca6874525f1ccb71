/* Functions of rows on a CPU. A row's bits depend on that row alone. See tape.c for kernels. */

#include <string.h>

#include "numbers.h"

enum { PART = 1024 }; /* numbers of a row that a thread takes at once */

/* The order of these is that of rows.py. */
typedef struct {
    const number *x; /* [rows, count], `stride` numbers apart */
    const void *weight; /* [count], float if `is_wide` */
    int64_t rows, count, stride;
    number *out; /* [rows, count], `out_stride` numbers apart; may be x */
    int64_t out_stride;
    int32_t is_wide;
    float eps;
} Norm;

enum { SILU, GELU, CLAMPED };

typedef struct {
    const number *both; /* [rows, 2 count], the gates first, `stride` numbers apart */
    int64_t rows, count, stride;
    number *out;         /* [rows, count] */
    const int64_t *used; /* the number of rows that there are, null for all */
    int32_t kind;        /* CLAMPED: gates and the others are cut to `limit`, and 1 is added */
    float alpha, limit;  /* of CLAMPED: SiLU is that of alpha times the gate, over alpha */
} Gated;

typedef struct {
    const number *x; /* [rows, count], `stride` numbers apart */
    int64_t rows, count, stride;
    float *out; /* [rows, count] */
} Widened;

typedef struct {
    number *x;          /* [rows, count], `stride` numbers apart */
    const number *gate; /* [rows, count], or [rows, 1] if `is_one`, `gate_stride` numbers apart */
    int64_t rows, count, stride, gate_stride;
    int32_t is_one;
} Factor;

typedef struct {
    number *x;           /* [rows, count], `stride` numbers apart */
    const float *factor; /* one for all */
    int64_t rows, count, stride;
} Scale;

typedef struct {
    const number *x; /* [rows, count], `stride` numbers apart */
    number *out;     /* the same, `out_stride` numbers apart */
    int64_t rows, count, stride, out_stride;
} Copy;

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
            own->out + t * own->out_stride
        );
}

/* Write x / (1 + e^-z) * y for `count` gates x and the others y, with the quotient rounded. z is x
   for SiLU; GELU's 0.5 x (1 + tanh(w)) is that with z = 2 w. */
static inline __attribute__((always_inline)) void gate(
    const number *gates, const number *others, int64_t count, const int kind, float alpha,
    float limit, number *out
) {
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        float x = wide(gates[i]), y = wide(others[i]), z = x;
        if (kind == GELU) z = 1.5957691216f * (x + 0.044715f * x * x * x);
        if (kind == CLAMPED) {
            x = x > limit ? limit : x;
            z = alpha * x;
            y = (y > limit ? limit : y < -limit ? -limit : y) + 1;
        }
        float part = power(-fabsf(z));
        float quotient = x / (1 + part) * (z < 0 ? part : 1);
        out[i] = narrow(wide(narrow(quotient)) * y);
    }
}

/* Write the gated activation of each row. */
void gated(const Gated *own) {
    int64_t rows = own->used ? *own->used : own->rows;
    int64_t count = own->count, parts = (count + PART - 1) / PART;
#pragma omp for nowait
    for (int64_t p = 0; p < rows * parts; p++) {
        int64_t t = p / parts, from = p % parts * PART;
        int64_t width = from + PART < count ? PART : count - from;
        const number *gates = own->both + t * own->stride + from, *others = gates + count;
        number *out = own->out + t * count + from;
        if (own->kind == SILU) gate(gates, others, width, SILU, 1, 0, out);
        if (own->kind == GELU) gate(gates, others, width, GELU, 1, 0, out);
        if (own->kind == CLAMPED) gate(gates, others, width, CLAMPED, own->alpha, own->limit, out);
    }
}

/* Multiply rows with the sigmoid of their gates, which is rounded. */
void sigmoid_mul(const Factor *own) {
    int64_t count = own->count, parts = (count + PART - 1) / PART;
#pragma omp for nowait
    for (int64_t p = 0; p < own->rows * parts; p++) {
        int64_t t = p / parts, from = p % parts * PART;
        int64_t to = from + PART < count ? from + PART : count;
        number *x = own->x + t * own->stride;
        const number *gate = own->gate + t * own->gate_stride;
        const int64_t step = own->is_one ? 0 : 1;
#pragma omp simd
        for (int64_t i = from; i < to; i++) {
            float z = wide(gate[i * step]), part = power(-fabsf(z));
            x[i] = narrow(wide(x[i]) * wide(narrow((z < 0 ? part : 1) / (1 + part))));
        }
    }
}

/* Multiply rows with a factor. */
void scale(const Scale *own) {
    float factor = *own->factor;
#pragma omp for nowait
    for (int64_t t = 0; t < own->rows; t++) {
        number *x = own->x + t * own->stride;
        for (int64_t i = 0; i < own->count; i++) x[i] = narrow(wide(x[i]) * factor);
    }
}

/* Copy rows. */
void copy(const Copy *own) {
#pragma omp for nowait
    for (int64_t t = 0; t < own->rows; t++)
        memcpy(
            own->out + t * own->out_stride, own->x + t * own->stride, own->count * sizeof(number)
        );
}

/* Write rows in float. */
void widen(const Widened *own) {
#pragma omp for nowait
    for (int64_t t = 0; t < own->rows; t++)
        for (int64_t i = 0; i < own->count; i++)
            own->out[t * own->count + i] = wide(own->x[t * own->stride + i]);
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
