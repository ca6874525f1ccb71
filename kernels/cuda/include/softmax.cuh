// Numbers of a softmax, whose scores are in units of ln 2.
#pragma once

constexpr float LOG2_E = 1.4426950408889634f;

// The score of a key that is not seen.
__device__ __forceinline__ float nothing() { return __int_as_float(0xFF800000); }

__device__ __forceinline__ float power_of_2(float x) {
    float found;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(x));
    return found;
}
