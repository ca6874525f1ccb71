// Codes of four bits in the words of kernels/quantized/device_matrix.py.
//
// Given: HALF, ZEROS (1 if the lowest four bits of a scale are its group's zero, which is else 8).
#pragma once
#include "numbers.cuh"

// Returns a scale without its group's zero.
__device__ __forceinline__ float without_zero(float scale) {
    return ZEROS ? __uint_as_float(__float_as_uint(scale) & ~15u) : scale;
}

// Returns what is added to a group's numbers to take away their offset, twice.
__device__ __forceinline__ u32 offset_of(float scale) {
    const u32 zero = ZEROS ? __float_as_uint(scale) & 15 : 8;
    // -128 or -1024, whose lowest bit counts 1.
    return (HALF ? 0xE400E400 : 0xC300C300) + zero * 0x00010001;
}

// Returns two numbers of a word of eight codes, of which `place` says which.
__device__ __forceinline__ u32 of_int4(u32 word, int place, u32 offset) {
    u32 bits;
    asm("lop3.b32 %0, %1, 0x000F000F, %2, 0xEA;"
        : "=r"(bits)
        : "r"(word >> (4 * place)), "n"(HALF ? 0x64006400 : 0x43004300));
    return added(bits, offset);
}
