/* Matrices of float or bfloat16, and their products, where reading the matrix takes all the time.

TILE rows of the matrix are multiplied together, and up to MOST_ROWS rows of inputs. Each result is
one sum in the order of the columns, so that its bits do not depend on other rows or on threads. */

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
#elif defined(__AVX2__) && defined(__FMA__)
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

static inline floats load_numbers(const number *p) {
#if defined(WIDE) && defined(BFLOAT16)
    __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
#elif defined(WIDE)
    return _mm512_loadu_ps(p);
#elif defined(BFLOAT16)
    __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
#else
    return _mm256_loadu_ps(p);
#endif
}

enum {
    MOST_ROWS = 8,
    VECTORS = 2, /* of a tile */
    TILE = VECTORS * LANES,
    AHEAD = 512 /* numbers by which a matrix is fetched ahead */
};

/* A matrix [outputs, inputs]. The order and the types are those of `PlainMatrixC` in matrices.py. */
typedef struct {
    const number *weight; /* [outputs / TILE, inputs, TILE], filled up */
    const float *bias;    /* [outputs, filled up], null for none */
    int64_t outputs, inputs;
} Matrix;

/* Rows of inputs in float. */
typedef struct {
    const float *x;
    int64_t stride; /* numbers from one row to the next */
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

/* Return the rows from one of them on. */
static inline Inputs inputs_from(Inputs all, int64_t row, int64_t inputs) {
    return (Inputs){all.x + row * all.stride, all.stride};
}

/* Multiply a tile of the matrix with `count` rows of inputs, which begin at `at`. */
static inline __attribute__((always_inline)) void multiply(
    const Matrix *matrix, int64_t tile, const float *const *at, const int count, number *out
) {
    const number *weight = matrix->weight + tile * matrix->inputs * TILE;
    int64_t inputs = matrix->inputs, first = tile * TILE;
    floats sums[VECTORS][MOST_ROWS];
    for (int i = 0; i < VECTORS; i++)
        for (int t = 0; t < count; t++) sums[i][t] = all_floats(0);
    for (int64_t k = 0; k < inputs; k++) {
        floats columns[VECTORS];
        for (int i = 0; i < VECTORS; i++) {
            const number *own = weight + (k * VECTORS + i) * LANES;
            if (count <= 2) _mm_prefetch((const char *)(own + AHEAD), _MM_HINT_T0);
            columns[i] = load_numbers(own);
        }
        for (int t = 0; t < count; t++) {
            floats input = all_floats(at[t][k]);
            for (int i = 0; i < VECTORS; i++) sums[i][t] = add_product(columns[i], input, sums[i][t]);
        }
    }
    int64_t last = first + TILE < matrix->outputs ? first + TILE : matrix->outputs;
    for (int t = 0; t < count; t++) {
        float made[TILE];
        for (int i = 0; i < VECTORS; i++) {
            floats result = sums[i][t];
            if (matrix->bias) result = plus(result, load_floats(matrix->bias + first + i * LANES));
            store_floats(made + i * LANES, result);
        }
        for (int64_t n = first; n < last; n++) out[t * matrix->outputs + n] = narrow(made[n - first]);
    }
}

/* Multiply a tile of the matrix with rows of inputs: those of a list, or the first ones.

out: [rows, outputs], of this matrix. */
static void multiply_tile(
    const Matrix *matrix, int64_t tile, const Inputs *x, const int64_t *list, int64_t rows,
    number *out
) {
    const float *at[MOST_ROWS];
    int64_t row = 0;
#define MULTIPLY(count)                                                                       \
    for (; row + count <= rows; row += count) {                                               \
        for (int t = 0; t < count; t++) at[t] = x->x + (list ? list[row + t] : row + t) * x->stride; \
        multiply(matrix, tile, at, count, out + row * matrix->outputs);                       \
    }
    MULTIPLY(8)
    MULTIPLY(4)
    MULTIPLY(2)
    MULTIPLY(1)
#undef MULTIPLY
}
