// Words that blocks of a kernel give one another through memory.
//
// A word itself tells whether it is there: before, memory has one that no instruction rounds to.
// So whoever waits for words reads nothing else, as in the LL protocol of NVIDIA's NCCL. Words that
// all blocks compute, and that each of them needs, have two places. Launches take turns with these,
// and each clears the place of the next one.
#pragma once
#include "hopper.cuh"

// A NaN, and two of 16 bits, which no instruction makes.
constexpr u32 NOT_THERE = ~0u;

__device__ __forceinline__ bool are_there(const uint4& words) {
    return words.x != NOT_THERE && words.y != NOT_THERE && words.z != NOT_THERE &&
           words.w != NOT_THERE;
}

// Returns which place a launch has, 0 or 1. One thread of each block calls it, once.
//
// The counter goes up to twice the number of blocks, and then to 0: a launch fills one half.
__device__ __forceinline__ u32 place_of_launch(u32* counter) {
    u32 before;
    asm volatile("atom.inc.relaxed.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(counter), "r"(2 * gridDim.x - 1)
                 : "memory");
    return before >= gridDim.x;
}

// Clears a block's share of a place, as a warp.
template <int BYTES>
__device__ __forceinline__ void clear_share(char* place) {
    for (int i = blockIdx.x + gridDim.x * (threadIdx.x % 32); i < BYTES / 16; i += 32 * gridDim.x)
        reinterpret_cast<uint4*>(place)[i] =
            make_uint4(NOT_THERE, NOT_THERE, NOT_THERE, NOT_THERE);
}

__device__ __forceinline__ void give_word(char* place, u32 word) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(place), "r"(word) : "memory");
}

__device__ __forceinline__ void give_words(char* place, const uint4& words) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(place), "r"(words.x),
                 "r"(words.y), "r"(words.z), "r"(words.w)
                 : "memory");
}

__device__ __forceinline__ uint4 words_now(const char* place) {
    uint4 found;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w)
                 : "l"(place)
                 : "memory");
    return found;
}

// Waits for all words of a place, and copies them to shared memory, as THREADS threads. They have
// to wait for one another then. ROW, APART: bytes of a row of words, and from one to the next there.
template <int BYTES, int THREADS, int ROW = BYTES, int APART = ROW>
__device__ __forceinline__ void take_words(char* target, const char* place) {
    constexpr int OWN = (BYTES / 16 + THREADS - 1) / THREADS;
    uint4 found[OWN];
    bool there;
    do {
        there = true;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const int at = (threadIdx.x + i * THREADS) * 16;
            if (at < BYTES) found[i] = words_now(place + at);
        }
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            there &= are_there(found[i]) || (threadIdx.x + i * THREADS) * 16 >= BYTES;
        }
    } while (!there);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const int at = (threadIdx.x + i * THREADS) * 16;
        if (at < BYTES) *reinterpret_cast<uint4*>(target + at / ROW * APART + at % ROW) = found[i];
    }
}
