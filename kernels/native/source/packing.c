/* Codes of a matrix in the order in which products read them, see coded.h for that order; and whether
   plain numbers fit in fewer bits. */

#ifdef __F16C__
#include <immintrin.h>
#endif
#include <stdint.h>
#include <string.h>

enum { GROUP = 32, FOUR = 4, SIGN = 128, EIGHT = 8 };

enum { BFLOAT = 1, HALF = 2 }; /* as in plain.h */

/* The arguments of `check`. The order is that of packing.py. */
typedef struct {
    const float *numbers; /* [rows, columns], `stride` numbers apart */
    int32_t *lost;        /* becomes 1 if the type does not have one of the numbers */
    int64_t rows, columns, stride;
    int32_t form;
} Check;

/* The arguments of `pack`. The order is that of packing.py. */
typedef struct {
    const uint8_t *codes; /* [rows, bytes], `stride` bytes apart */
    uint8_t *out;         /* [tiles, groups, vectors of a group, tile FOUR] */
    int64_t rows, bytes, stride, tile;
    int32_t bits; /* 8, with a sign, or 4, two in a byte, the first in the lower half */
} Pack;

/* Write four codes of 8 bits without their signs, or eight of 4 bits of which the second four come
   into upper halves. */
static inline void pack_four(const uint8_t *in, int bits, uint8_t *out) {
    if (bits == 8) {
        for (int j = 0; j < FOUR; j++) out[j] = in[j] ^ SIGN;
        return;
    }
    out[0] = (in[0] & 15) | (in[2] & 15) << 4;
    out[1] = in[0] >> 4 | (in[2] & 0xf0);
    out[2] = (in[1] & 15) | (in[3] & 15) << 4;
    out[3] = in[1] >> 4 | (in[3] & 0xf0);
}

/* Write the codes of all rows. Zeros fill up the last tile and the last group. */
void pack(const Pack *own) {
    int64_t tile = own->tile, size = GROUP * own->bits / 8, vectors = size / FOUR;
    int64_t groups = (own->bytes + size - 1) / size, tiles = (own->rows + tile - 1) / tile;
#pragma omp for nowait
    for (int64_t i = 0; i < tiles; i++) {
        uint8_t *out = own->out + i * groups * size * tile;
        if (own->rows < (i + 1) * tile || own->bytes % size) memset(out, 0, groups * size * tile);
        int64_t lanes = own->rows - i * tile < tile ? own->rows - i * tile : tile;
        for (int64_t v = 0; v < groups * vectors && v * FOUR < own->bytes; v++)
            for (int64_t n = 0; n < lanes; n++) {
                const uint8_t *in = own->codes + (i * tile + n) * own->stride + v * FOUR;
                uint8_t last[FOUR] = {0};
                int64_t left = own->bytes - v * FOUR;
                if (left < FOUR) {
                    memcpy(last, in, left);
                    if (own->bits == 8) memset(last + left, SIGN, FOUR - left);
                    in = last;
                }
                pack_four(in, own->bits, out + (v * tile + n) * FOUR);
            }
    }
}

/* Return whether bfloat16, the upper half of a float, lacks one of the numbers. */
static int lost_in_bfloat(const float *numbers, int64_t count) {
    uint32_t lost = 0;
    for (int64_t k = 0; k < count; k++) {
        uint32_t bits;
        memcpy(&bits, numbers + k, sizeof bits);
        lost |= bits & 0xffff;
    }
    return lost != 0;
}

/* Return whether half lacks one of the numbers. NaN counts as lost. */
static int lost_in_half(const float *numbers, int64_t count) {
#ifdef __F16C__
    int lost = 0;
    for (int64_t k = 0; k < count; k += EIGHT) {
        float eight[EIGHT] = {0};
        memcpy(eight, numbers + k, (count - k < EIGHT ? count - k : EIGHT) * sizeof *eight);
        __m256 given = _mm256_loadu_ps(eight);
        __m256 back = _mm256_cvtph_ps(_mm256_cvtps_ph(given, _MM_FROUND_TO_NEAREST_INT));
        lost |= _mm256_movemask_ps(_mm256_cmp_ps(given, back, _CMP_NEQ_UQ));
    }
    return lost;
#else
    return 1;
#endif
}

/* Find out whether a type of 16 bits has all numbers. */
void check(const Check *own) {
#pragma omp for nowait
    for (int64_t row = 0; row < own->rows; row++) {
        if (__atomic_load_n(own->lost, __ATOMIC_RELAXED)) continue;
        const float *numbers = own->numbers + row * own->stride;
        int lost = own->form == BFLOAT ? lost_in_bfloat(numbers, own->columns)
                                       : lost_in_half(numbers, own->columns);
        if (lost) __atomic_store_n(own->lost, 1, __ATOMIC_RELAXED);
    }
}
