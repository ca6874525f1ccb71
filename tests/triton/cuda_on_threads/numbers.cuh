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
