// The choice of a row's experts by a warp, as kernels/experts/common/choice_triton.py makes it. A
// thread has every 32nd logit.
//
// Given: EXPERTS (to choose among), CHOSEN, PARTS (of the router's product), WIDE (numbers of its
// rows), NORMALISED, JOINED (whether the last expert of CHOSEN is one that each row has), GATED
// (whether the product has a gate of that one behind the logits).
#pragma once
#include "numbers.cuh"

struct Logits {
    // Parts of the router's product, and its bias or null.
    const float *parts, *bias;
};

struct Factors {
    // Of the experts' weights, and the least sum that they are divided by. Of a norm behind.
    float scale, tiny, eps;
};

// Returns a number in the order of integers.
__device__ __forceinline__ int ordered(float value) {
    const int bits = __float_as_int(value + 0.0f);
    return bits < 0 ? bits ^ 0x7FFFFFFF : bits;
}

__device__ __forceinline__ float number_of(int key) {
    return __int_as_float(key < 0 ? key ^ 0x7FFFFFFF : key);
}

__device__ __forceinline__ float sum_of_warp(float value) {
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) value += __shfl_xor_sync(~0u, value, apart);
    return value;
}

// The logits of a warp, in the order of integers, and the choice among them as
// kernels/experts/common/choice_triton.py makes it.
struct Choice {
    static constexpr int LEAST = 0x80000000, GROUPS = (EXPERTS + 31) / 32;
    int keys[GROUPS];

    __device__ __forceinline__ explicit Choice(const Logits& logits) {
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            const int expert = 32 * group + threadIdx.x % 32;
            float sum = 0.0f;
            for (int part = 0; part < PARTS; part++)
                sum += expert < EXPERTS ? logits.parts[part * WIDE + expert] : 0.0f;
            if (logits.bias && expert < EXPERTS) sum += logits.bias[expert];
            keys[group] = expert < EXPERTS ? ordered(sum) : LEAST;
        }
    }

    // Takes the best of those that are left, the lowest index of several. Returns its key.
    __device__ __forceinline__ int take(int& index) {
        const int lane = threadIdx.x % 32;
        int best = keys[0];
#pragma unroll
        for (int group = 1; group < GROUPS; group++) best = max(best, keys[group]);
        best = __reduce_max_sync(~0u, best);
        int first = 1 << 30;
#pragma unroll
        for (int group = GROUPS - 1; group >= 0; group--)
            if (keys[group] == best) first = 32 * group + lane;
        index = __reduce_min_sync(~0u, first);
#pragma unroll
        for (int group = 0; group < GROUPS; group++)
            if (32 * group + lane == index) keys[group] = LEAST;
        return best;
    }

    // Returns the sum of exp(logit - most).
    __device__ __forceinline__ float powers(float most) const {
        float sum = 0.0f;
#pragma unroll
        for (int group = 0; group < GROUPS; group++)
            sum += keys[group] == LEAST ? 0.0f : __expf(number_of(keys[group]) - most);
        return sum_of_warp(sum);
    }
};

// Writes the experts' weights, as a warp.
__device__ __forceinline__ void weigh(
    float (&weights)[CHOSEN], const Logits& logits, const Factors& factors) {
    constexpr int PICKED = CHOSEN - JOINED;
    const int lane = threadIdx.x % 32;
    float gate = 0.0f;
    if (GATED && lane == PICKED)
        for (int part = 0; part < PARTS; part++) gate += logits.parts[part * WIDE + EXPERTS];
    Choice choice(logits);
    const Choice all = choice;
    float most = 0.0f, every = 0.0f, total = 0.0f, own = 0.0f;
#pragma unroll
    for (int place = 0; place < PICKED; place++) {
        int index;
        const float best = number_of(choice.take(index));
        if (place == 0) most = best, every = all.powers(most);
        const float score = divided(__expf(best - most), every);
        total += score;
        if (lane == place) own = score;
    }
    if (lane < PICKED)
        weights[lane] = (NORMALISED ? divided(own, total + factors.tiny) : own) * factors.scale;
    else if (lane < CHOSEN)
        weights[lane] = GATED ? divided(1.0f, 1.0f + __expf(-gate)) : 1.0f;
}
