// Two blocks of a cluster that multiply the same rows of a matrix, each with inputs of its own.
//
// A tile has 128 rows of inputs and 256 of the matrix. Both come in steps of 128 bytes of a row, in
// the copy engine's pattern, and each has a ring: of W_STAGES and of X_STAGES. Two warpgroups
// multiply 64 rows of inputs each, and the warps of a third one load.
//
// The compiler is given: EIGHT (1 for numbers in e4m3, 0 for those in 16 bits), W_STAGES, X_STAGES.
#pragma once
#include "hopper.cuh"
#include "wgmma.cuh"

constexpr int ROWS = 128, COLUMNS = 256;
constexpr int ROW_BYTES = 128, STEP = EIGHT ? 128 : 64;
constexpr int X_BYTES = ROWS * ROW_BYTES, W_BYTES = COLUMNS * ROW_BYTES;
// Sums of a thread, and of the tensor cores' product at once.
constexpr int SUMS = COLUMNS / 2, AT_ONCE = EIGHT ? SUMS / 2 : SUMS;

// The rings of a block, their barriers, and where a thread stands in them. WRITERS: the threads that
// copy a step of the inputs, or 1 if the copy engine does.
template <int WRITERS>
struct Rings {
    static constexpr bool COPIED = WRITERS > 1;
    u32 w, x, w_full, w_empty, x_full, x_empty;
    Place<W_STAGES> w_at;
    Place<X_STAGES> x_at;

    __device__ __forceinline__ Rings(char* memory, u64* barriers) {
        w = shared_address(memory), x = w + W_STAGES * W_BYTES;
        w_full = shared_address(barriers), w_empty = w_full + 8 * W_STAGES;
        x_full = w_empty + 8 * W_STAGES, x_empty = x_full + 8 * X_STAGES;
    }

    __device__ __forceinline__ void init() {
        for (int slot = 0; slot < W_STAGES; slot++) {
            barrier_init(w_full + 8 * slot, 1);
            // All warps that multiply, of both blocks.
            barrier_init(w_empty + 8 * slot, 16);
        }
        for (int slot = 0; slot < X_STAGES; slot++) {
            barrier_init(x_full + 8 * slot, WRITERS);
            barrier_init(x_empty + 8 * slot, 8);
        }
        barrier_init_done();
    }

    // Waits for a step, for those who multiply.
    __device__ __forceinline__ void wait() const {
        barrier_wait(w_full + 8 * w_at.slot, w_at.phase);
        barrier_wait(x_full + 8 * x_at.slot, x_at.phase);
    }

    // Tells those who load that this warp is done with a step: in both blocks for the matrix.
    __device__ __forceinline__ void release(int w_slot, int x_slot) const {
        const int lane = threadIdx.x % 32;
        if (lane < 2) barrier_arrive(w_empty + 8 * w_slot, lane);
        if (lane == 2) barrier_arrive_here(x_empty + 8 * x_slot);
    }

    __device__ __forceinline__ void next() { w_at.next(), x_at.next(); }

    __device__ __forceinline__ u32 w_is_full() const { return w_full + 8 * w_at.slot; }

    // Waits until a step of the matrix may be loaded, whose barrier then expects it. Returns where
    // it goes.
    __device__ __forceinline__ u32 expect_w() const {
        barrier_wait(w_empty + 8 * w_at.slot, w_at.phase ^ 1);
        barrier_expect(w_is_full(), W_BYTES);
        return w + w_at.slot * W_BYTES;
    }

    // Loads the inputs of a tile, whose rows begin at `row`, as one thread.
    __device__ __forceinline__ void load_x(const TileMap* map, int row, int steps) {
        for (int step = 0; step < steps; step++, x_at.next()) {
            const u32 barrier = x_full + 8 * x_at.slot;
            barrier_wait(x_empty + 8 * x_at.slot, x_at.phase ^ 1);
            barrier_expect(barrier, X_BYTES);
            load_tile<false>(map, x + x_at.slot * X_BYTES, barrier, step * STEP, row, 0);
        }
    }

    // Lets the steps of a tile pass, for those who multiply nothing of it.
    __device__ __forceinline__ void skip(int steps) {
        for (int step = 0; step < steps; step++) {
            wait();
            release(w_at.slot, x_at.slot);
            next();
        }
    }
};

// Begins the product of a step with rows of the matrix from `first` on.
template <class Rings>
__device__ __forceinline__ void begin(
    float (&product)[AT_ONCE], const Rings& rings, int own, int first, bool more) {
    const u64 x = rows_of_128(rings.x + rings.x_at.slot * X_BYTES + own * ROW_BYTES);
    const u64 w = rows_of_128(rings.w + rings.w_at.slot * W_BYTES + first * ROW_BYTES);
    hold(product);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++) multiply(product, x + 2 * k, w + 2 * k, more || k > 0);
    wgmma_commit();
    hold(product);
}

#if !EIGHT
// Returns the sums of a tile.
template <class Rings>
__device__ __forceinline__ void multiply_tile(
    float (&sum)[SUMS], Rings& rings, int own, int steps) {
    int w_before = 0, x_before = 0;
    for (int step = 0; step < steps; step++) {
        rings.wait();
        // Threads copied x, and the tensor cores read it.
        if (Rings::COPIED) shared_memory_fence();
        begin(sum, rings, own, 0, step > 0);
        if (step > 0) {
            // The tensor cores have this step, and are done with the one before.
            wgmma_wait<1>();
            rings.release(w_before, x_before);
        }
        w_before = rings.w_at.slot, x_before = rings.x_at.slot;
        rings.next();
    }
    wgmma_wait<0>();
    hold(sum);
    rings.release(w_before, x_before);
}
#endif
