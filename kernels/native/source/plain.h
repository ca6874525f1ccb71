/* Plain matrices and their products, where reading the matrix takes all the time.

TILE rows of the matrix are multiplied together, and up to MOST_ROWS rows of inputs. Each result is
one sum in the order of the columns, so that its bits do not depend on other rows or on threads.

A matrix may be kept in fewer bits than the inputs have, where that loses nothing. Its numbers are
widened in registers, so that a result has the same bits. */

#include <immintrin.h>
#include <stddef.h>

#include "numbers.h"

#if defined(__AVX512BW__) && !defined(NARROW)
#define WIDE
enum { LANES = 16 };
typedef __m512 floats;
#define all_floats(f) _mm512_set1_ps(f)
#define plus(a, b) _mm512_add_ps(a, b)
#define add_product(a, b, sum) _mm512_fmadd_ps(a, b, sum)
#define load_floats(p) _mm512_loadu_ps(p)
#define store_floats(p, f) _mm512_storeu_ps(p, f)
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
enum { LANES = 8 };
typedef __m256 floats;
#define all_floats(f) _mm256_set1_ps(f)
#define plus(a, b) _mm256_add_ps(a, b)
#define add_product(a, b, sum) _mm256_fmadd_ps(a, b, sum)
#define load_floats(p) _mm256_loadu_ps(p)
#define store_floats(p, f) _mm256_storeu_ps(p, f)
#else
#error "this CPU has no vectors with fused products (AVX2)"
#endif

/* How a matrix is kept, as matrices.py has it; and a part of its columns in float, near in memory. */
enum { FLOAT, BFLOAT, HALF, NEAR };

static inline int64_t bytes_of(const int form) { return form == FLOAT || form == NEAR ? 4 : 2; }

/* Return the numbers from `index` on, in float. */
static inline floats load_numbers(const void *from, int64_t index, const int form) {
    const uint16_t *two = (const uint16_t *)from + index;
    if (form == FLOAT || form == NEAR) return load_floats((const float *)from + index);
#ifdef WIDE
    __m256i numbers = _mm256_loadu_si256((const __m256i *)two);
    if (form == HALF) return _mm512_cvtph_ps(numbers);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16));
#else
    __m128i numbers = _mm_loadu_si128((const __m128i *)two);
    if (form == HALF) return _mm256_cvtph_ps(numbers);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(numbers), 16));
#endif
}

enum {
    MOST_ROWS = 8,
    VECTORS = 2, /* of a tile */
    TILE = VECTORS * LANES,
    TOGETHER = 128, /* rows that share a part of the columns, near in memory */
    CHUNK = 128,    /* columns of a part */
    AHEAD = 2048 /* bytes by which a matrix is fetched ahead */
};

/* A matrix [outputs, inputs]. The order and the types are those of `PlainMatrixC` in matrices.py. */
typedef struct {
    const void *weight; /* [outputs / TILE, inputs, TILE], filled up */
    const float *bias;  /* [outputs, filled up], null for none */
    int64_t outputs, inputs;
    int32_t form;
} Matrix;

/* Rows of inputs in float. */
typedef struct {
    const float *x;
    int64_t stride;  /* numbers from one row to the next */
    int64_t blocked; /* whether x is [rows / MOST_ROWS, columns, MOST_ROWS] instead, filled up */
} Inputs;

/* Return rows in float. memory: for rows of bfloat16, in float. All threads take part, and wait for
   the end where there is anything to do. */
static inline Inputs inputs_of(
    const number *x, int64_t rows, int64_t stride, int64_t inputs, void *memory
) {
#ifdef BFLOAT16
    float *made = memory;
#pragma omp for
    for (int64_t t = 0; t < rows; t++)
        for (int64_t k = 0; k < inputs; k++) made[t * inputs + k] = wide(x[t * stride + k]);
    return (Inputs){made, inputs};
#else
    return (Inputs){x, stride};
#endif
}

/* Return rows in blocks, which lie near each other for each column. All threads take part, and wait
   for the end. memory: for all rows, filled up to whole blocks. */
static inline Inputs blocked_inputs_of(
    const number *x, int64_t rows, int64_t stride, int64_t inputs, void *memory
) {
    float *made = memory;
#pragma omp for
    for (int64_t first = 0; first < rows; first += MOST_ROWS)
        for (int64_t k = 0; k < inputs; k++)
            for (int t = 0; t < MOST_ROWS; t++)
                made[first * inputs + k * MOST_ROWS + t] =
                    first + t < rows ? wide(x[(first + t) * stride + k]) : 0;
    return (Inputs){made, inputs, 1};
}

/* Return the rows from one of them on: where they are in blocks, the first one of a block. */
static inline Inputs inputs_from(Inputs all, int64_t row, int64_t inputs) {
    return (Inputs){all.x + row * all.stride, all.stride, all.blocked};
}

/* Add to sums of a tile [count, VECTORS] the products of its next columns with rows at `at`, whose
   numbers are `step` apart. */
static inline __attribute__((always_inline)) void add_columns(
    const void *weight, int64_t columns, const float *const *at, const int step, const int count,
    const int form, floats *kept
) {
    floats sums[VECTORS][MOST_ROWS];
    for (int i = 0; i < VECTORS; i++)
        for (int t = 0; t < count; t++) sums[i][t] = kept[t * VECTORS + i];
    for (int64_t k = 0; k < columns; k++) {
        floats column[VECTORS];
        for (int i = 0; i < VECTORS; i++) {
            int64_t index = (k * VECTORS + i) * LANES;
            if (form != NEAR)
                _mm_prefetch((const char *)weight + index * bytes_of(form) + AHEAD, _MM_HINT_T0);
            column[i] = load_numbers(weight, index, form);
        }
        for (int t = 0; t < count; t++) {
            floats input = all_floats(at[t][k * step]);
            for (int i = 0; i < VECTORS; i++) sums[i][t] = add_product(column[i], input, sums[i][t]);
        }
    }
    for (int i = 0; i < VECTORS; i++)
        for (int t = 0; t < count; t++) kept[t * VECTORS + i] = sums[i][t];
}

/* Do so for any number of rows: those of a list, or the first ones. */
static inline __attribute__((always_inline)) void add_rows(
    const void *weight, int64_t first, int64_t columns, const Inputs *x, const int64_t *list,
    int64_t rows, const int form, floats *sums
) {
    const float *at[MOST_ROWS];
    int64_t row = 0;
#define ADD(count)                                                                       \
    for (; row + count <= rows; row += count) {                                          \
        for (int t = 0; t < count; t++)                                                  \
            at[t] = x->x + (list ? list[row + t] : row + t) * x->stride + first;         \
        add_columns(weight, columns, at, 1, count, form, sums + row * VECTORS);          \
    }
    ADD(8)
    ADD(4)
    ADD(2)
    ADD(1)
#undef ADD
}

/* Do so for rows in blocks. */
static void add_blocks(
    const float *weight, int64_t first, int64_t columns, const Inputs *x, int64_t rows, floats *sums
) {
    for (int64_t row = 0; row < rows; row += MOST_ROWS) {
        const float *at[MOST_ROWS];
        for (int t = 0; t < MOST_ROWS; t++) at[t] = x->x + row * x->stride + first * MOST_ROWS + t;
        add_columns(weight, columns, at, MOST_ROWS, MOST_ROWS, NEAR, sums + row * VECTORS);
    }
}

/* Write the results of a row. */
static inline void finish(const Matrix *matrix, int64_t tile, const floats *sums, number *out) {
    int64_t first = tile * TILE;
    int64_t last = first + TILE < matrix->outputs ? first + TILE : matrix->outputs;
    float made[TILE];
    for (int i = 0; i < VECTORS; i++) {
        floats result = sums[i];
        if (matrix->bias) result = plus(result, load_floats(matrix->bias + first + i * LANES));
        store_floats(made + i * LANES, result);
    }
    for (int64_t n = first; n < last; n++) out[n] = narrow(made[n - first]);
}

/* Multiply a tile of the matrix with rows of inputs: those of a list, or the first ones.

out: [rows, outputs], of this matrix. */
static void multiply_tile(
    const Matrix *matrix, int64_t tile, const Inputs *x, const int64_t *list, int64_t rows,
    number *out
) {
    floats sums[TOGETHER * VECTORS];
    float near[CHUNK * TILE];
    const int form = matrix->form;
    int64_t inputs = matrix->inputs;
    const char *weight = (const char *)matrix->weight + tile * inputs * TILE * bytes_of(form);
    for (int64_t row = 0, count; row < rows; row += count) {
        count = rows - row < TOGETHER ? rows - row : TOGETHER;
        Inputs own = list ? *x : inputs_from(*x, row, inputs);
        const int64_t *rest = list ? list + row : NULL;
        int64_t filled = (count + MOST_ROWS - 1) / MOST_ROWS * MOST_ROWS; /* up to whole blocks */
        for (int64_t i = 0; i < filled * VECTORS; i++) sums[i] = all_floats(0);
        if (count <= MOST_ROWS && !own.blocked) {
            if (form == FLOAT) add_rows(weight, 0, inputs, &own, rest, count, FLOAT, sums);
            if (form == BFLOAT) add_rows(weight, 0, inputs, &own, rest, count, BFLOAT, sums);
            if (form == HALF) add_rows(weight, 0, inputs, &own, rest, count, HALF, sums);
        } else
            for (int64_t k = 0; k < inputs; k += CHUNK) {
                int64_t columns = inputs - k < CHUNK ? inputs - k : CHUNK;
                const char *from = weight + k * TILE * bytes_of(form);
                for (int64_t i = 0; i < columns * VECTORS; i++) {
                    _mm_prefetch(from + i * LANES * bytes_of(form) + AHEAD, _MM_HINT_T0);
                    floats numbers = form == FLOAT ? load_numbers(from, i * LANES, FLOAT)
                                     : form == BFLOAT ? load_numbers(from, i * LANES, BFLOAT)
                                                      : load_numbers(from, i * LANES, HALF);
                    store_floats(near + i * LANES, numbers);
                }
                if (own.blocked)
                    add_blocks(near, k, columns, &own, count, sums);
                else
                    add_rows(near, k, columns, &own, rest, count, NEAR, sums);
            }
        for (int64_t t = 0; t < count; t++)
            finish(matrix, tile, sums + t * VECTORS, out + (row + t) * matrix->outputs);
    }
}
