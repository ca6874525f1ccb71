// Heads of a query or a key between the projections and attention: their norm, where a model has it,
// and the rotary embedding. Rounds as kernels/attention/qkv_rope_triton.py does.
//
// Given: DIM (of a head), WITH_NORMS.
#pragma once
#include "numbers.cuh"

// Threads of a warp that have a head, the heads that it has at once, and words of a thread in each
// half of a head. A word has two numbers.
constexpr int HEAD_THREADS = DIM / 4 < 32 ? DIM / 4 : 32, HEADS_AT_ONCE = 32 / HEAD_THREADS;
constexpr int HEAD_WORDS = DIM / 4 / HEAD_THREADS;

// What a thread has of a head: words of its lower half and of its upper one.
struct Head {
    u32 low[HEAD_WORDS], high[HEAD_WORDS];

    // Returns the place of a thread's word of the lower half, in bytes. The upper half lies behind.
    __device__ __forceinline__ static int byte(int i) {
        return (threadIdx.x % HEAD_THREADS + i * HEAD_THREADS) * 4;
    }

    __device__ __forceinline__ void read(u32 address) {
#pragma unroll
        for (int i = 0; i < HEAD_WORDS; i++)
            low[i] = word(address + byte(i)), high[i] = word(address + DIM + byte(i));
    }

    __device__ __forceinline__ void read(const u16* head) {
#pragma unroll
        for (int i = 0; i < HEAD_WORDS; i++) {
            low[i] = __ldg(reinterpret_cast<const u32*>(head) + byte(i) / 4);
            high[i] = __ldg(reinterpret_cast<const u32*>(head + DIM / 2) + byte(i) / 4);
        }
    }

    __device__ __forceinline__ void write(u32 address) const {
#pragma unroll
        for (int i = 0; i < HEAD_WORDS; i++) {
            write_word(address + byte(i), low[i]);
            write_word(address + DIM + byte(i), high[i]);
        }
    }

    __device__ __forceinline__ void write(u16* head) const {
#pragma unroll
        for (int i = 0; i < HEAD_WORDS; i++) {
            reinterpret_cast<u32*>(head)[byte(i) / 4] = low[i];
            reinterpret_cast<u32*>(head + DIM / 2)[byte(i) / 4] = high[i];
        }
    }

    // Norms the head. weights: the norm's.
    __device__ __forceinline__ void norm(const Head& weights, float eps) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < HEAD_WORDS; i++) {
            const float2 x = widened_two(low[i]), y = widened_two(high[i]);
            sum += x.x * x.x + x.y * x.y + y.x * y.x + y.y * y.y;
        }
#pragma unroll
        for (int apart = HEAD_THREADS / 2; apart > 0; apart /= 2)
            sum += __shfl_xor_sync(~0u, sum, apart);
        const float scale = rsqrtf(sum / DIM + eps);
#pragma unroll
        for (int i = 0; i < HEAD_WORDS; i++) {
            const float2 x = widened_two(low[i]), y = widened_two(high[i]);
            low[i] = multiplied(packed(x.x * scale, x.y * scale), weights.low[i]);
            high[i] = multiplied(packed(y.x * scale, y.y * scale), weights.high[i]);
        }
    }
};

// A thread's part of the rotation of a token.
struct Angles {
    float2 cos[HEAD_WORDS], sin[HEAD_WORDS];

    // Reads DIM / 2 cosines and as many sines from shared memory.
    __device__ __forceinline__ Angles(u32 cosines, u32 sines) {
#pragma unroll
        for (int i = 0; i < HEAD_WORDS; i++) {
            const int at = 2 * Head::byte(i);
            cos[i] = make_float2(number(cosines + at), number(cosines + at + 4));
            sin[i] = make_float2(number(sines + at), number(sines + at + 4));
        }
    }

    __device__ __forceinline__ void turn(Head& head) const {
#pragma unroll
        for (int i = 0; i < HEAD_WORDS; i++) {
            const float2 x = widened_two(head.low[i]), y = widened_two(head.high[i]);
            const float2 c = cos[i], s = sin[i];
            head.low[i] = packed(x.x * c.x - y.x * s.x, x.y * c.y - y.y * s.y);
            head.high[i] = packed(y.x * c.x + x.x * s.x, y.y * c.y + x.y * s.y);
        }
    }
};
