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
