// silu(x gate^T) * (x up^T) for many rows of x, in 16 bits.
//
// A cluster of two blocks takes item after item: two tiles of 128 rows of x, and 128 columns of the
// result, for which each block loads half of the matrix's rows for both: the gate's or up's. Items
// that run at the same time are those of GROUP pairs of tiles and neighbouring columns, so L2 is
// asked for few rows of both operands.
//
// The compiler is given: W_STAGES, X_STAGES, HALF (0: bfloat16, 1: float16).
#define EIGHT 0
#include "tile_rings.cuh"
// Results are those of an expert without biases and scales.
#define GATED 1
#define GELU 0
#define CLAMPED 0
#define ALPHA 0.0f
#define LIMIT 0.0f
#define ROW_SCALES 0
#define WITH_BIAS 0
#include "expert_results.cuh"

constexpr int GROUP = 8, OUTPUTS = COLUMNS / 2;

struct Sizes {
    // Rows of x, bytes of one, columns of the result, and their parts of OUTPUTS.
    int rows, row_bytes, outputs, parts;
};

// What a block works on: a tile of rows, and columns of the result.
struct Item {
    int row, column;

    __device__ __forceinline__ Item(int place, int rank, const Sizes& sizes) {
        const int pairs = (sizes.rows + 2 * ROWS - 1) / (2 * ROWS);
        const int group = place / (GROUP * sizes.parts), within = place % (GROUP * sizes.parts);
        // The last group may have fewer pairs.
        const int high = min(GROUP, pairs - group * GROUP);
        row = ((group * GROUP + within % high) * 2 + rank) * ROWS;
        column = within / high * OUTPUTS;
    }
};

extern "C" __global__ void __launch_bounds__(384, 1) __cluster_dims__(2, 1, 1) gated_product(
    const __grid_constant__ TileMap x_map, const __grid_constant__ TileMap w_map, u16* out,
    const __grid_constant__ Sizes sizes, int items) {
    extern __shared__ __align__(1024) char memory[];
    __shared__ __align__(8) u64 barriers[2 * (W_STAGES + X_STAGES)];
    Rings<1> rings(memory, barriers);
    const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int rank = cluster_rank(), first = blockIdx.x / 2, clusters = gridDim.x / 2;
    const int steps = (sizes.row_bytes + ROW_BYTES - 1) / ROW_BYTES;
    if (threadIdx.x == 0) rings.init();
    cluster_sync();
    wait_for_kernels_before();
    let_next_kernel_start();

    if (warpgroup == 2) {
        fewer_registers<40>();
        if (warp == 0 && lane == 0) {
            for (int place = first; place < items; place += clusters) {
                const int row = Item(place, rank, sizes).column + rank * sizes.outputs;
                for (int step = 0; step < steps; step++, rings.w_at.next()) {
                    const u32 target = rings.expect_w() + rank * (W_BYTES / 2);
                    load_tile<true>(&w_map, target, rings.w_is_full(), step * STEP, row, 3);
                }
            }
        } else if (warp == 1 && lane == 0) {
            for (int place = first; place < items; place += clusters)
                rings.load_x(&x_map, Item(place, rank, sizes).row, steps);
        }
    } else {
        more_registers<232>();
        const int own = warpgroup * 64;
        for (int place = first; place < items; place += clusters) {
            const Item item(place, rank, sizes);
            if (item.row + own >= sizes.rows) {
                rings.skip(steps);
                continue;
            }
            float sum[SUMS];
            multiply_tile(sum, rings, own, steps);
            u16* targets[2];
            for (int i = 0; i < 2; i++) {
                const int row = item.row + own + warp * 16 + lane / 4 + 8 * i;
                targets[i] = row < sizes.rows ? out + u64(row) * sizes.outputs : nullptr;
            }
            write_numbers<OUTPUTS>(
                sum, targets, item.column, Columns{nullptr, nullptr, sizes.outputs});
        }
    }
    // A block's memory must stay until the other has written and arrived there.
    cluster_sync();
}
