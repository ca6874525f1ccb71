/* x W^T on a CPU for matrices W of float or bfloat16, where reading W takes all the time.

LANES rows of the matrix are multiplied together, and up to MOST_ROWS rows of inputs. Each result is
one sum in the order of the columns, so that its bits do not depend on other rows or on threads. */

#include <immintrin.h>

#include "numbers.h"

#if defined(__AVX512BW__) && !defined(NARROW)
#define WIDE
enum { LANES = 16 };
typedef __m512 floats;
#define all_floats(f) _mm512_set1_ps(f)
#define add_product(a, b, sum) _mm512_fmadd_ps(a, b, sum)
#define store_floats(p, f) _mm512_storeu_ps(p, f)
#elif defined(__AVX2__) && defined(__FMA__)
enum { LANES = 8 };
typedef __m256 floats;
#define all_floats(f) _mm256_set1_ps(f)
#define add_product(a, b, sum) _mm256_fmadd_ps(a, b, sum)
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
    TILES = 2,            /* that are multiplied together */
    WIDTH = TILES * LANES,
    AHEAD = 512           /* numbers by which a matrix is fetched ahead */
};

/* The arguments of `product`. The order is that of native_layouts.py. */
typedef struct {
    const number *weight; /* [outputs / WIDTH, inputs, WIDTH], filled up */
    const number *x;      /* [rows, inputs], `stride` numbers apart */
    number *out;          /* [rows, outputs] */
    float *wider;         /* memory for x in float, [rows, inputs]; null if x is float */
    int64_t outputs, inputs, rows, stride;
} Product;

int width(void) { return WIDTH; }

/* Multiply WIDTH rows of the matrix, from `first` on, with `count` rows of inputs. */
static inline __attribute__((always_inline)) void multiply(
    const number *weight, const float *x, int64_t inputs, int64_t stride, int64_t first,
    int64_t outputs, const int count, number *out
) {
    floats sums[TILES][MOST_ROWS];
    for (int i = 0; i < TILES; i++)
        for (int t = 0; t < count; t++) sums[i][t] = all_floats(0);
    for (int64_t k = 0; k < inputs; k++) {
        floats columns[TILES];
        for (int i = 0; i < TILES; i++) {
            const number *own = weight + (k * TILES + i) * LANES;
            if (count <= 2) _mm_prefetch((const char *)(own + AHEAD), _MM_HINT_T0);
            columns[i] = load_numbers(own);
        }
        for (int t = 0; t < count; t++) {
            floats input = all_floats(x[t * stride + k]);
            for (int i = 0; i < TILES; i++) sums[i][t] = add_product(columns[i], input, sums[i][t]);
        }
    }
    int64_t last = first + WIDTH < outputs ? first + WIDTH : outputs;
    for (int t = 0; t < count; t++) {
        float made[WIDTH];
        for (int i = 0; i < TILES; i++) store_floats(made + i * LANES, sums[i][t]);
        for (int64_t n = first; n < last; n++) out[t * outputs + n] = narrow(made[n - first]);
    }
}

/* Multiply WIDTH rows of the matrix with all rows of inputs. */
static void multiply_tile(
    const number *weight, const float *x, int64_t rows, int64_t inputs, int64_t stride,
    int64_t first, int64_t outputs, number *out
) {
    int64_t t = 0;
#define MULTIPLY(count)                                                                         \
    for (; t + count <= rows; t += count)                                                       \
        multiply(weight, x + t * stride, inputs, stride, first, outputs, count, out + t * outputs)
    MULTIPLY(8);
    MULTIPLY(4);
    MULTIPLY(2);
    MULTIPLY(1);
}

/* Return inputs as floats, and their stride. */
static const float *floats_of(const Product *own, int64_t *stride) {
#ifdef BFLOAT16
#pragma omp for
    for (int64_t t = 0; t < own->rows; t++)
        for (int64_t k = 0; k < own->inputs; k++)
            own->wider[t * own->inputs + k] = wide(own->x[t * own->stride + k]);
    *stride = own->inputs;
    return own->wider;
#else
    *stride = own->stride;
    return own->x;
#endif
}

/* Write x W^T. See tape.c for kernels. */
void product(const Product *own) {
    int64_t tiles = (own->outputs + WIDTH - 1) / WIDTH, stride;
    const float *x = floats_of(own, &stride);
#pragma omp for schedule(static) nowait
    for (int64_t tile = 0; tile < tiles; tile++)
        multiply_tile(
            own->weight + tile * own->inputs * WIDTH, x, own->rows, own->inputs, stride,
            tile * WIDTH, own->outputs, own->out
        );
}
