// A ring of slots in shared memory, each with codes of 16 rows, and behind them their scales and
// biases.
//
// Given: STAGES (slots), SLOT_BYTES, CODE_BYTES (of them), GATE_PARTS (warps that share a slot's
// codes of gate and up), GATE_ROW (bytes of a row's codes).
#pragma once
#include "hopper.cuh"

struct Ring {
    u32 memory, full, done, empty;

    __device__ __forceinline__ void init() const {
        for (int slot = 0; slot < STAGES; slot++) {
            // The copy of codes, and a warp's copies of what is behind them.
            barrier_init(full + 8 * slot, 1 + 32);
            barrier_init(done + 8 * slot, GATE_PARTS);
            barrier_init(empty + 8 * slot, 1);
        }
    }

    // index: of a slot's content among all of a block.
    __device__ __forceinline__ u32 content(int index) const {
        return memory + slot(index) * SLOT_BYTES;
    }
    __device__ __forceinline__ u32 beside(int index) const { return content(index) + CODE_BYTES; }
    __device__ __forceinline__ u32 is_full(int index) const { return full + 8 * slot(index); }
    __device__ __forceinline__ u32 is_done(int index) const { return done + 8 * slot(index); }
    __device__ __forceinline__ u32 is_empty(int index) const { return empty + 8 * slot(index); }
    __device__ __forceinline__ static int slot(int index) { return index % STAGES; }
    // Whether a slot is used for an odd time.
    __device__ __forceinline__ u32 phase(int index) const { return index / STAGES & 1; }

    __device__ __forceinline__ void wait_until_empty(int index) const {
        barrier_wait(is_empty(index), phase(index) ^ 1);
    }
    __device__ __forceinline__ void wait_until_full(int index) const {
        barrier_wait(is_full(index), phase(index));
    }
};

// Copies the scales of eight rows, as a warp. Groups of columns lie `between` numbers apart, and
// `apart` bytes in shared memory.
template <int GROUPS, int COUNT>
__device__ __forceinline__ void copy_scales(
    u32 target, const float* scales, int between, int apart) {
    constexpr int PIECES = COUNT == 8 ? 2 : 1;
    for (int i = threadIdx.x % 32; i < GROUPS * PIECES; i += 32) {
        const u32 to = target + i / PIECES * apart + i % PIECES * 16;
        const float* from = scales + u64(i / PIECES) * between + i % PIECES * 4;
        if (COUNT == 8) copy_16(to, from, 16);
        else copy_4(to, from);
    }
}

// Loads up to two times eight rows into an empty slot, with their scales, as a warp. What the warp
// copied before belongs to the slot too. Rows `apart` lie behind one another; HEIGHT rows share a
// scale. scale_rows: scales of a group of columns.
template <int GROUPS, int SCALES, int HEIGHT>
__device__ __forceinline__ void load_eights(
    const Ring& ring, int index, const unsigned char* codes, const float* scales, int scale_rows,
    int row, int apart, int count, u64 once) {
    const u32 beside = ring.beside(index), full = ring.is_full(index);
    for (int i = 0; i < count; i++)
        copy_scales<GROUPS, SCALES>(
            beside + i * 4 * SCALES, scales + (row + i * apart) / HEIGHT, scale_rows, 8 * SCALES);
    arrive_when_copied(full);
    if (threadIdx.x % 32 == 0) {
        barrier_expect(full, count * 8 * GATE_ROW);
        for (int i = 0; i < count; i++)
            load_bytes_by(
                ring.content(index) + i * 8 * GATE_ROW, codes + u64(row + i * apart) * GATE_ROW,
                8 * GATE_ROW, full, once);
    }
    __syncwarp();
}
