// Numbers of 16 bits: bfloat16, or float16 where HALF is 1.
#pragma once
#include "hopper.cuh"

__device__ __forceinline__ float widened(u32 bits) {
    float value;
    if (HALF) {
        asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low; }"
            : "=f"(value)
            : "r"(bits));
    } else {
        value = __uint_as_float(bits << 16);
    }
    return value;
}

// Returns the two numbers of a word.
__device__ __forceinline__ float2 widened_two(u32 both) {
    return make_float2(widened(both & 0xFFFF), widened(both >> 16));
}

// Returns two numbers in a word, the first in its lower half.
__device__ __forceinline__ u32 packed(float low, float high) {
    u32 word;
    if (HALF) {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    }
    return word;
}

__device__ __forceinline__ float rounded(float value) {
    return widened(packed(value, 0.0f) & 0xFFFF);
}

// Computes with the two numbers of each word, and rounds.
#define OF_TWO_NUMBERS(name, operation)                                                          \
    __device__ __forceinline__ u32 name(u32 two, u32 others) {                                   \
        u32 word;                                                                                \
        if (HALF) {                                                                              \
            asm(operation ".rn.f16x2 %0, %1, %2;" : "=r"(word) : "r"(two), "r"(others));         \
        } else {                                                                                 \
            asm(operation ".rn.bf16x2 %0, %1, %2;" : "=r"(word) : "r"(two), "r"(others));        \
        }                                                                                        \
        return word;                                                                             \
    }
OF_TWO_NUMBERS(multiplied, "mul")
OF_TWO_NUMBERS(added, "add")
OF_TWO_NUMBERS(subtracted, "sub")

// Returns a / b with an error of two units in the last place, or as Triton divides.
__device__ __forceinline__ float divided(float a, float b) {
#ifdef AS_TRITON_DIVIDES
    float found;
    asm("div.full.f32 %0, %1, %2;" : "=f"(found) : "f"(a), "f"(b));
    return found;
#else
    return __fdividef(a, b);
#endif
}

// Returns silu(gate), rounded as in kernels/triton/silu_mul_triton.py. gate: is rounded.
__device__ __forceinline__ float silu(float gate) {
    return rounded(divided(gate, 1.0f + __expf(-gate)));
}

// Returns two numbers in e4m3, the first in the lower byte.
__device__ __forceinline__ u16 codes_of(float low, float high) {
    u16 both;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
    return both;
}

// Exchanges rows and columns of 8 x 8 numbers of a warp.
__device__ __forceinline__ u32 transposed(u32 word) {
    u32 found;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(found) : "r"(word));
    return found;
}

// Four neighbouring threads have a word of two columns each of 8 columns, and one of the next 8.
// Returns four columns in a row: for the first two threads of the first 8, for the others of the
// second.
__device__ __forceinline__ uint2 four_columns(u32 first, u32 second) {
    const int quad = threadIdx.x % 4;
    const u32 other = __shfl_xor_sync(~0u, quad < 2 ? second : first, 2);
    const u32 even = quad < 2 ? first : other, odd = quad < 2 ? other : second;
    const u32 swapped = __shfl_xor_sync(~0u, quad & 1 ? even : odd, 1);
    return quad & 1 ? make_uint2(swapped, odd) : make_uint2(even, swapped);
}
