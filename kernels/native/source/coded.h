/* Matrices of 8 or 4 bits, and their products with rows that are rounded to 8 bits.

Each GROUP of a row's inputs is rounded with a scale of its own, as llama.cpp's Q8_0 does. Sums of a
group's products are whole numbers, and so exact; then they are multiplied with the scales and added
in the order of the groups. So the bits of a row do not depend on other rows or on threads.

A number is scale * (code - middle) - minimum, with codes from 0 on; codes of 4 bits may stand for
those of a table. TILE rows of the matrix are multiplied together: a vector has FOUR codes of each.
In 4 bits it has eight of each, the second four in the upper halves of the bytes. */

#include <immintrin.h>
#include <string.h>

#include "numbers.h"

enum {
    GROUP = 32, FOUR = 4, MOST_ROWS = 8, LARGEST = 127,
    AHEAD = 2048 /* bytes by which codes are fetched ahead */
};

#if defined(__AVX512VNNI__) && !defined(NARROW)
enum { TILE = 16 };
typedef __m512i ints;
typedef __m512 floats;
#define load_codes(p) _mm512_loadu_si512(p)
#define lower_half(v) _mm512_and_si512(v, _mm512_set1_epi8(15))
#define upper_half(v) _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15))
#define load_table(p) _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(p)))
#define look_up(table, v) _mm512_shuffle_epi8(table, v)
#define all_ints(i) _mm512_set1_epi32(i)
#define all_floats(f) _mm512_set1_ps(f)
#define dot(sum, codes, x) _mm512_dpbusd_epi32(sum, codes, x)
#define to_floats(i) _mm512_cvtepi32_ps(i)
#define plus(a, b) _mm512_add_ps(a, b)
#define times(a, b) _mm512_mul_ps(a, b)
#define add_product(a, b, sum) _mm512_fmadd_ps(a, b, sum)
#define load_halves(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
#define load_floats(p) _mm512_loadu_ps(p)
#define store_floats(p, f) _mm512_storeu_ps(p, f)
#elif defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))
enum { TILE = 8 };
typedef __m256i ints;
typedef __m256 floats;
#define load_codes(p) _mm256_loadu_si256((const __m256i *)(p))
#define lower_half(v) _mm256_and_si256(v, _mm256_set1_epi8(15))
#define upper_half(v) _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15))
#define load_table(p) _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(p)))
#define look_up(table, v) _mm256_shuffle_epi8(table, v)
#define all_ints(i) _mm256_set1_epi32(i)
#define all_floats(f) _mm256_set1_ps(f)
#ifdef __AVXVNNI__
#define dot(sum, codes, x) _mm256_dpbusd_avx_epi32(sum, codes, x)
#else
#define dot(sum, codes, x) _mm256_dpbusd_epi32(sum, codes, x)
#endif
#define to_floats(i) _mm256_cvtepi32_ps(i)
#define plus(a, b) _mm256_add_ps(a, b)
#define times(a, b) _mm256_mul_ps(a, b)
#define add_product(a, b, sum) _mm256_fmadd_ps(a, b, sum)
#define load_halves(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
#define load_floats(p) _mm256_loadu_ps(p)
#define store_floats(p, f) _mm256_storeu_ps(p, f)
#else
#error "this CPU has no instructions for products of 8-bit numbers (VNNI)"
#endif

enum { VECTOR = TILE * FOUR }; /* bytes */

/* A matrix [outputs, inputs]. The order and the types are those of `CodedMatrixC` in matrices.py. */
typedef struct {
    const uint8_t *codes;     /* [outputs / TILE, groups, vectors of a group, VECTOR] */
    const uint16_t *scales;   /* half [outputs / TILE, scaled groups, TILE], null for ones */
    const uint16_t *minimums; /* like the scales, null for zeros */
    const float *factors;     /* [outputs, filled up]: what a row is multiplied with at the end */
    const float *bias;        /* [outputs, filled up], null for none */
    const uint8_t *table;     /* [16]: what codes of 4 bits stand for, null for themselves */
    int64_t outputs, inputs;
    int32_t bits;   /* 8 or 4 */
    int32_t repeat; /* groups of inputs that share a scale */
    int32_t middle; /* the code of zero, before the minimum */
} Matrix;

/* Rows of inputs in 8 bits. */
typedef struct {
    int8_t *codes;  /* [rows, groups, GROUP] */
    float *scales;  /* [rows, groups] */
    int32_t *sums;  /* [rows, groups]: of the codes */
} Inputs;

static inline int64_t groups_of(int64_t inputs) { return (inputs + GROUP - 1) / GROUP; }

/* Round a group of numbers. If they are not all finite, it gets NaN for its scale. */
static void round_group(const number *x, int count, int64_t index, const Inputs *out) {
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

/* Round one of the groups of rows that lie `stride` numbers apart. */
static inline void round_one(
    const number *x, int64_t stride, int64_t inputs, int64_t index, const Inputs *out
) {
    int64_t groups = groups_of(inputs), first = index % groups * GROUP;
    int count = inputs - first < GROUP ? inputs - first : GROUP;
    round_group(x + index / groups * stride + first, count, index, out);
}

/* Return rounded rows. memory: 40 bytes a group. All threads take part, and all wait for the end. */
static Inputs inputs_of(
    const number *x, int64_t rows, int64_t stride, int64_t inputs, void *memory
) {
    int64_t all = rows * groups_of(inputs);
    Inputs made;
    made.scales = memory;
    made.sums = (int32_t *)(made.scales + all);
    made.codes = (int8_t *)(made.sums + all);
#pragma omp for
    for (int64_t i = 0; i < all; i++) round_one(x, stride, inputs, i, &made);
    return made;
}

/* Return the rows from one of them on. */
static inline Inputs inputs_from(Inputs all, int64_t row, int64_t inputs) {
    int64_t group = row * groups_of(inputs);
    return (Inputs){all.codes + group * GROUP, all.scales + group, all.sums + group};
}

enum { EIGHT, HALVES, LOOKED_UP }; /* how codes are read */

/* Multiply TILE rows of the matrix with `count` rows of inputs. at: the first group of each. */
static inline __attribute__((always_inline)) void multiply(
    const Matrix *matrix, int64_t tile, const Inputs *x, const int64_t *at, const int count,
    const int form, number *out
) {
    const int bits = form == EIGHT ? 8 : 4, vectors = GROUP * bits / 8 / FOUR;
    int64_t groups = groups_of(matrix->inputs);
    const uint8_t *codes = matrix->codes + tile * groups * vectors * VECTOR;
    int64_t scaled = (groups + matrix->repeat - 1) / matrix->repeat;
    ints table;
    if (form == LOOKED_UP) table = load_table(matrix->table);
    floats totals[MOST_ROWS], scale = all_floats(1), minimum = all_floats(0);
    for (int t = 0; t < count; t++) totals[t] = all_floats(0);
    for (int64_t g = 0; g < groups; g++, codes += vectors * VECTOR) {
        int64_t place = (tile * scaled + g / matrix->repeat) * TILE;
        if (matrix->scales) scale = load_halves(matrix->scales + place);
        if (matrix->minimums) minimum = load_halves(matrix->minimums + place);
        ints sums[MOST_ROWS];
        for (int t = 0; t < count; t++) sums[t] = all_ints(-matrix->middle * x->sums[at[t] + g]);
        for (int v = 0; v < vectors; v++) {
            _mm_prefetch((const char *)codes + v * VECTOR + AHEAD, _MM_HINT_T0);
            ints both = load_codes(codes + v * VECTOR);
            ints first = bits == 8 ? both : lower_half(both);
            ints second = bits == 8 ? both : upper_half(both);
            if (form == LOOKED_UP) {
                first = look_up(table, first);
                second = look_up(table, second);
            }
            for (int t = 0; t < count; t++) {
                int32_t four[2];
                const int8_t *own = x->codes + (at[t] + g) * GROUP;
                memcpy(four, own + v * FOUR * 8 / bits, FOUR * 8 / bits);
                sums[t] = dot(sums[t], first, all_ints(four[0]));
                if (bits == 4) sums[t] = dot(sums[t], second, all_ints(four[1]));
            }
        }
        for (int t = 0; t < count; t++) {
            int64_t of = at[t] + g;
            floats share = times(scale, all_floats(x->scales[of]));
            totals[t] = add_product(to_floats(sums[t]), share, totals[t]);
            if (matrix->minimums)
                totals[t] = add_product(
                    minimum, all_floats(-x->scales[of] * x->sums[of]), totals[t]
                );
        }
    }
    int64_t first = tile * TILE, last = first + TILE;
    if (last > matrix->outputs) last = matrix->outputs;
    for (int t = 0; t < count; t++) {
        float made[TILE];
        floats result = times(totals[t], load_floats(matrix->factors + first));
        if (matrix->bias) result = plus(result, load_floats(matrix->bias + first));
        store_floats(made, result);
        for (int64_t n = first; n < last; n++) out[t * matrix->outputs + n] = narrow(made[n - first]);
    }
}

/* Multiply TILE rows of the matrix with rows of inputs: those of a list, or the first ones.

out: [rows, outputs], of this matrix. */
static void multiply_tile(
    const Matrix *matrix, int64_t tile, const Inputs *x, const int64_t *list, int64_t rows,
    number *out
) {
    int64_t groups = groups_of(matrix->inputs), row = 0, at[MOST_ROWS];
    const int form = matrix->bits == 8 ? EIGHT : matrix->table ? LOOKED_UP : HALVES;
#define MULTIPLY(count)                                                                  \
    for (; row + count <= rows; row += count) {                                          \
        number *own = out + row * matrix->outputs;                                       \
        for (int t = 0; t < count; t++) at[t] = (list ? list[row + t] : row + t) * groups; \
        if (form == EIGHT) multiply(matrix, tile, x, at, count, EIGHT, own);             \
        if (form == HALVES) multiply(matrix, tile, x, at, count, HALVES, own);           \
        if (form == LOOKED_UP) multiply(matrix, tile, x, at, count, LOOKED_UP, own);     \
    }
    MULTIPLY(8)
    MULTIPLY(4)
    MULTIPLY(2)
    MULTIPLY(1)
#undef MULTIPLY
}
