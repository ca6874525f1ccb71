/* x W^T on a CPU for matrices W of 8 or 4 bits, with inputs rounded to 8 bits.

Each GROUP of a row's inputs is rounded with a scale of its own, as llama.cpp's Q8_0 does. Sums of a
group's products are whole numbers, and so exact; then they are multiplied with the scales and added
in the order of the groups. So the bits of a row do not depend on other rows or on threads.

A number is scale * (code - zero) - minimum, with codes from 0 on. LANES rows of the matrix are
multiplied together: a vector has FOUR codes of each. In 4 bits it has eight of each, the second
four in the upper halves of the bytes. */

#include <immintrin.h>
#include <string.h>

#include "numbers.h"

enum { GROUP = 32, FOUR = 4, MOST_ROWS = 8, MIDDLE_8 = 128, MIDDLE_4 = 8, LARGEST = 127 };
/* Groups of inputs that each thread rounds for itself: that takes less time than to wait for another.
   It stands in native_layouts.py too. */
enum { ROUNDED_ALONE = 256 };

#if defined(__AVX512VNNI__) && !defined(NARROW)
enum { LANES = 16 };
typedef __m512i ints;
typedef __m512 floats;
#define load_codes(p) _mm512_loadu_si512(p)
#define lower_half(v) _mm512_and_si512(v, _mm512_set1_epi8(15))
#define upper_half(v) _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15))
#define all_ints(i) _mm512_set1_epi32(i)
#define all_floats(f) _mm512_set1_ps(f)
#define dot(sum, codes, x) _mm512_dpbusd_epi32(sum, codes, x)
#define to_floats(i) _mm512_cvtepi32_ps(i)
#define times(a, b) _mm512_mul_ps(a, b)
#define add_product(a, b, sum) _mm512_fmadd_ps(a, b, sum)
#define load_halves(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
#define load_floats(p) _mm512_loadu_ps(p)
#define store_floats(p, f) _mm512_storeu_ps(p, f)
#elif defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))
enum { LANES = 8 };
typedef __m256i ints;
typedef __m256 floats;
#define load_codes(p) _mm256_loadu_si256((const __m256i *)(p))
#define lower_half(v) _mm256_and_si256(v, _mm256_set1_epi8(15))
#define upper_half(v) _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15))
#define all_ints(i) _mm256_set1_epi32(i)
#define all_floats(f) _mm256_set1_ps(f)
#ifdef __AVXVNNI__
#define dot(sum, codes, x) _mm256_dpbusd_avx_epi32(sum, codes, x)
#else
#define dot(sum, codes, x) _mm256_dpbusd_epi32(sum, codes, x)
#endif
#define to_floats(i) _mm256_cvtepi32_ps(i)
#define times(a, b) _mm256_mul_ps(a, b)
#define add_product(a, b, sum) _mm256_fmadd_ps(a, b, sum)
#define load_halves(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
#define load_floats(p) _mm256_loadu_ps(p)
#define store_floats(p, f) _mm256_storeu_ps(p, f)
#else
#error "this CPU has no instructions for products of 8-bit numbers (VNNI)"
#endif

enum { VECTOR = LANES * FOUR }; /* bytes */

/* A matrix [outputs, inputs]. The order and the types are those of native_layouts.py. */
typedef struct {
    const uint8_t *codes;     /* [outputs / LANES, groups, vectors of a group, VECTOR] */
    const uint16_t *scales;   /* half [outputs / LANES, scaled groups, LANES], null for ones */
    const uint16_t *minimums; /* like the scales, null for zeros */
    const float *factors;     /* [outputs, filled up]: what a row is multiplied with at the end */
    int64_t outputs, inputs;
    int32_t bits;   /* 8 or 4 */
    int32_t repeat; /* groups of inputs that share a scale */
} Matrix;

/* Rows of inputs in 8 bits. */
typedef struct {
    int8_t *codes;  /* [rows, groups, GROUP] */
    float *scales;  /* [rows, groups] */
    int32_t *sums;  /* [rows, groups]: of the codes */
} Rounded;

/* The arguments of `product`. The order is that of native_layouts.py. */
typedef struct {
    const Matrix *matrix;
    const number *x; /* [rows, inputs], `stride` numbers apart */
    number *out;     /* [rows, outputs] */
    void *memory;    /* for rounded inputs, 40 bytes a group; null if each thread rounds them */
    int64_t rows, stride;
} Product;

int lanes(void) { return LANES; }

/* Round a group of a row. If its numbers are not all finite, it gets NaN for its scale. */
static void round_group(const Product *own, int64_t groups, int64_t index, const Rounded *out) {
    int64_t row = index / groups, first = index % groups * GROUP, inputs = own->matrix->inputs;
    const number *x = own->x + row * own->stride + first;
    int count = inputs - first < GROUP ? inputs - first : GROUP;
    int8_t *codes = out->codes + index * GROUP;
    float values[GROUP] = {0}, most = 0;
    for (int i = 0; i < count; i++) values[i] = wide(x[i]);
#pragma omp simd reduction(max : most)
    for (int i = 0; i < GROUP; i++) most = fabsf(values[i]) > most ? fabsf(values[i]) : most;
    float check = 0;
#pragma omp simd reduction(+ : check)
    for (int i = 0; i < GROUP; i++) check += values[i] * 0;
    float inverse = most > 0 ? LARGEST / most : 0;
    int sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < GROUP; i++) {
        int code = check == 0 ? (int)rintf(values[i] * inverse) : 0;
        code = code > LARGEST ? LARGEST : code < -LARGEST ? -LARGEST : code;
        codes[i] = code;
        sum += code;
    }
    out->scales[index] = most / LARGEST + check;
    out->sums[index] = sum;
}

/* Multiply LANES rows of the matrix with `count` rows of inputs. */
static inline __attribute__((always_inline)) void multiply(
    const Matrix *matrix, int64_t tile, const Rounded *x, int64_t groups, int64_t row,
    const int count, const int bits, number *out
) {
    const int vectors = GROUP * bits / 8 / FOUR;
    const uint8_t *codes = matrix->codes + tile * groups * vectors * VECTOR;
    int64_t scaled = (groups + matrix->repeat - 1) / matrix->repeat;
    floats totals[MOST_ROWS], scale = all_floats(1), minimum = all_floats(0);
    for (int t = 0; t < count; t++) totals[t] = all_floats(0);
    for (int64_t g = 0; g < groups; g++, codes += vectors * VECTOR) {
        int64_t place = (tile * scaled + g / matrix->repeat) * LANES;
        if (matrix->scales) scale = load_halves(matrix->scales + place);
        if (matrix->minimums) minimum = load_halves(matrix->minimums + place);
        ints sums[MOST_ROWS];
        for (int t = 0; t < count; t++) {
            int middle = bits == 8 ? MIDDLE_8 : matrix->minimums ? 0 : MIDDLE_4;
            sums[t] = all_ints(-middle * x->sums[(row + t) * groups + g]);
        }
        for (int v = 0; v < vectors; v++) {
            ints both = load_codes(codes + v * VECTOR);
            ints first = bits == 8 ? both : lower_half(both);
            ints second = bits == 8 ? both : upper_half(both);
            for (int t = 0; t < count; t++) {
                int32_t four[2];
                const int8_t *own = x->codes + ((row + t) * groups + g) * GROUP;
                memcpy(four, own + v * FOUR * 8 / bits, FOUR * 8 / bits);
                sums[t] = dot(sums[t], first, all_ints(four[0]));
                if (bits == 4) sums[t] = dot(sums[t], second, all_ints(four[1]));
            }
        }
        for (int t = 0; t < count; t++) {
            int64_t of = (row + t) * groups + g;
            floats share = times(scale, all_floats(x->scales[of]));
            totals[t] = add_product(to_floats(sums[t]), share, totals[t]);
            if (matrix->minimums)
                totals[t] = add_product(
                    minimum, all_floats(-x->scales[of] * x->sums[of]), totals[t]
                );
        }
    }
    int64_t first = tile * LANES, last = first + LANES;
    if (last > matrix->outputs) last = matrix->outputs;
    for (int t = 0; t < count; t++) {
        float made[LANES];
        store_floats(made, times(totals[t], load_floats(matrix->factors + first)));
        for (int64_t n = first; n < last; n++)
            out[(row + t) * matrix->outputs + n] = narrow(made[n - first]);
    }
}

#define MULTIPLY(count)                                                        \
    (matrix->bits == 8 ? multiply(matrix, tile, x, groups, row, count, 8, out) \
                       : multiply(matrix, tile, x, groups, row, count, 4, out))

static void multiply_tile(
    const Matrix *matrix, int64_t tile, const Rounded *x, int64_t groups, int64_t rows, number *out
) {
    int64_t row = 0;
    for (; row + 8 <= rows; row += 8) MULTIPLY(8);
    if (row + 4 <= rows) {
        MULTIPLY(4);
        row += 4;
    }
    if (row + 2 <= rows) {
        MULTIPLY(2);
        row += 2;
    }
    if (row < rows) MULTIPLY(1);
}

/* Write x W^T. See tape.c for kernels. */
void product(const Product *own) {
    const Matrix *matrix = own->matrix;
    int64_t groups = (matrix->inputs + GROUP - 1) / GROUP, all = own->rows * groups;
    int64_t tiles = (matrix->outputs + LANES - 1) / LANES;
    int8_t codes[ROUNDED_ALONE * GROUP];
    float scales[ROUNDED_ALONE];
    int32_t sums[ROUNDED_ALONE];
    Rounded x = {codes, scales, sums};
    if (own->memory) {
        x.scales = own->memory;
        x.sums = (int32_t *)(x.scales + all);
        x.codes = (int8_t *)(x.sums + all);
#pragma omp for
        for (int64_t i = 0; i < all; i++) round_group(own, groups, i, &x);
    } else {
        for (int64_t i = 0; i < all; i++) round_group(own, groups, i, &x);
    }
#pragma omp for schedule(static) nowait
    for (int64_t tile = 0; tile < tiles; tile++)
        multiply_tile(matrix, tile, &x, groups, own->rows, own->out);
}
