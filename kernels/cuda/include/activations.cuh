// Gated activations. Given: GELU, CLAMPED with ALPHA and LIMIT.
#pragma once
#include "numbers.cuh"

// Returns act(gate) * up, with the roundings of kernels/experts/common/expert_activation_triton.py.
__device__ __forceinline__ float activated(float gate, float up) {
    gate = rounded(gate), up = rounded(up);
    if (CLAMPED) {
        gate = gate > LIMIT ? LIMIT : gate;
        up = up > LIMIT ? LIMIT : up < -LIMIT ? -LIMIT : up;
        return divided(gate, 1.0f + __expf(-ALPHA * gate)) * (up + 1.0f);
    }
    if (GELU) {
        const float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
        return rounded(divided(gate, 1.0f + __expf(-2.0f * inner))) * up;
    }
    return silu(gate) * up;
}
