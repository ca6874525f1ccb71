// The functions of kernels/cuda/include/numbers.cuh, for bfloat16.
#pragma once
#include "hopper.cuh"

inline u32 bfloat16(float value) {
    if (value != value) return 0x7FFF;
    const u32 bits = __float_as_uint(value);
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline float widened(u32 bits) { return __uint_as_float(bits << 16); }
inline float2 widened_two(u32 both) { return {widened(both & 0xFFFF), widened(both >> 16)}; }
inline u32 packed(float low, float high) { return bfloat16(low) | bfloat16(high) << 16; }
inline float rounded(float value) { return widened(bfloat16(value)); }
template <class Operation>
inline u32 of_two(u32 two, u32 others, Operation operation) {
    const float2 a = widened_two(two), b = widened_two(others);
    return packed(operation(a.x, b.x), operation(a.y, b.y));
}
inline u32 multiplied(u32 two, u32 others) {
    return of_two(two, others, [](float a, float b) { return a * b; });
}
inline u32 added(u32 two, u32 others) {
    return of_two(two, others, [](float a, float b) { return a + b; });
}
inline u32 subtracted(u32 two, u32 others) {
    return of_two(two, others, [](float a, float b) { return a - b; });
}
inline float divided(float a, float b) { return a / b; }
inline float silu(float gate) { return rounded(divided(gate, 1.0f + __expf(-gate))); }
u16 codes_of(float low, float high);  // no kernel here writes codes

// ---- Products of a warp ----

// Loads four squares of 8 x 8 numbers, as ldmatrix does. Each thread has the address of a row.
inline void load_squares(u32 (&words)[4], u32 address, bool transposed) {
    Warp& warp = current->block->warps[current->index.x / 32];
    const int lane = own_lane(), row = transposed ? lane % 4 * 2 : lane / 4;
    warp.given[lane][0] = address;
    u32 rows[4], next[4];
    as_warp("ldmatrix", [](Warp&) {});
    for (int i = 0; i < 4; i++)
        rows[i] = warp.given[8 * i + row][0], next[i] = warp.given[8 * i + (row + 1) % 8][0];
    for (int i = 0; i < 4; i++)
        words[i] = transposed ? shared<u16>(rows[i] + lane / 4 * 2) |
                                    u32(shared<u16>(next[i] + lane / 4 * 2)) << 16
                              : shared<u32>(rows[i] + lane % 4 * 4);
    as_warp("loaded", [](Warp&) {});
}

// sum += x w, of 16 x 16 and 16 x 8 numbers, as mma.m16n8k16 does.
inline void multiply_squares(float (&sum)[4], const u32 (&x)[4], const u32 (&w)[2]) {
    Warp& warp = current->block->warps[current->index.x / 32];
    const int lane = own_lane();
    for (int i = 0; i < 4; i++)
        warp.given[lane][i] = x[i], warp.given[lane][6 + i] = __float_as_uint(sum[i]);
    warp.given[lane][4] = w[0], warp.given[lane][5] = w[1];
    as_warp("product", [](Warp& warp) {
        const auto number = [&](int lane, int word, int half) {
            return widened(warp.given[lane][word] >> 16 * half & 0xFFFF);
        };
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++) {
                const int row = lane / 4 * 4, column = (lane % 4 * 2 + i % 2) * 4;
                float total = __uint_as_float(warp.given[lane][6 + i]);
                for (int k = 0; k < 16; k++)
                    total += number(row + k % 8 / 2, i / 2 + k / 8 * 2, k % 2) *
                             number(column + k % 8 / 2, 4 + k / 8, k % 2);
                warp.taken[lane][i] = __float_as_uint(total);
            }
    });
    for (int i = 0; i < 4; i++) sum[i] = __uint_as_float(warp.taken[lane][i]);
}

// Exchanges rows and columns of 8 x 8 numbers: a lane has two numbers of row lane / 4.
inline u32 transposed(u32 word) {
    u32 found = 0;
    for (int half = 0; half < 2; half++) {
        const int row = own_lane() % 4 * 2 + half, column = own_lane() / 4;
        found |= (from_lane(word, row * 4 + column / 2) >> 16 * (column % 2) & 0xFFFF) << 16 * half;
    }
    return found;
}
inline uint2 four_columns(u32 first, u32 second) {
    const int lane = own_lane(), quad = lane % 4, even = lane - quad + quad % 2 * 2;
    u32 found[2];
    for (int i = 0; i < 2; i++) {
        const u32 low = from_lane(first, even + i), high = from_lane(second, even + i);
        found[i] = quad < 2 ? low : high;
    }
    return {found[0], found[1]};
}
