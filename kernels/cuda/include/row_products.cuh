// Products of many rows of x, whose sums a kernel turns into its results while it has them.
//
// A cluster of two blocks takes item after item: two tiles of 128 rows of x, and 256 rows of the
// matrix, of which each block loads one half for both. Items that run at the same time are those of
// GROUP pairs of tiles and neighbouring columns, so L2 is asked for few rows of both operands.
#pragma once
#include "tile_rings.cuh"

constexpr int GROUP = 8;

struct Sizes {
    // Rows of x, bytes of one, columns of the result, and their parts, of which an item has one.
    int rows, row_bytes, outputs, parts;
};

// A tile of rows of x, and the number of the result's part.
struct Item {
    int row, part;

    __device__ __forceinline__ Item(int place, int rank, const Sizes& sizes) {
        const int pairs = (sizes.rows + 2 * ROWS - 1) / (2 * ROWS);
        const int group = place / (GROUP * sizes.parts), within = place % (GROUP * sizes.parts);
        // The last group may have fewer pairs.
        const int high = min(GROUP, pairs - group * GROUP);
        row = ((group * GROUP + within % high) * 2 + rank) * ROWS;
        part = within / high;
    }
};

// Returns the first row of a thread among those of its warpgroup. The second one is 8 further.
__device__ __forceinline__ int own_row() {
    return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
}

// The items of a block.
struct Items {
    int count, rank;

    // Calls take(item) for each of them in order.
    template <class Take>
    __device__ __forceinline__ void each(const Sizes& sizes, Take take) const {
        for (int place = blockIdx.x / 2; place < count; place += gridDim.x / 2)
            take(Item(place, rank, sizes));
    }
};

// Multiplies as a whole kernel. each, apart: rows of the matrix from a part to the next one, and from
// the first half of a part's rows to the second. finish(sum, item, own): has the sums of the tile's
// rows from `own` on, as a warpgroup.
template <class Finish>
__device__ __forceinline__ void multiply_rows(
    const TileMap* x_map, const TileMap* w_map, const Sizes& sizes, int count, int each, int apart,
    Finish finish) {
    extern __shared__ __align__(1024) char memory[];
    __shared__ __align__(8) u64 barriers[2 * (W_STAGES + X_STAGES)];
    Rings<1> rings(memory, barriers);
    const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int steps = (sizes.row_bytes + ROW_BYTES - 1) / ROW_BYTES;
    const Items items = {count, int(cluster_rank())};
    if (threadIdx.x == 0) rings.init();
    cluster_sync();
    wait_for_kernels_before();
    let_next_kernel_start();

    if (warpgroup == 2) {
        fewer_registers<40>();
        if (warp == 0 && lane == 0) {
            items.each(sizes, [&](const Item& item) {
                const int row = item.part * each + items.rank * apart;
                for (int step = 0; step < steps; step++, rings.w_at.next()) {
                    const u32 target = rings.expect_w() + items.rank * (W_BYTES / 2);
                    load_tile<true>(w_map, target, rings.w_is_full(), step * STEP, row, 3);
                }
            });
        } else if (warp == 1 && lane == 0) {
            items.each(sizes, [&](const Item& item) { rings.load_x(x_map, item.row, steps); });
        }
    } else {
        more_registers<232>();
        const int own = warpgroup * (ROWS / 2);
        items.each(sizes, [&](const Item& item) {
            if (item.row + own >= sizes.rows) {
                rings.skip(steps);
                return;
            }
            float sum[SUMS];
            multiply_tile(sum, rings, own, steps);
            finish(sum, item, own);
        });
    }
    // A block's memory must stay until the other has written and arrived there.
    cluster_sync();
}
