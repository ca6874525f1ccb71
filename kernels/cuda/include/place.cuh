// Where a thread stands in a ring of slots. It names no instruction.
#pragma once

// A slot of a ring in shared memory, and whether it is used for an odd time.
template <int SLOTS>
struct Place {
    int slot = 0;
    u32 phase = 0;

    __device__ __forceinline__ void next() {
        if (++slot == SLOTS) slot = 0, phase ^= 1;
    }

    __device__ __forceinline__ void skip(int count) {
        slot += count;
        phase ^= slot / SLOTS & 1, slot %= SLOTS;
    }
};
