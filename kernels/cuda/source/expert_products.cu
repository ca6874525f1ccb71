// The products of experts for many pairs of a token and an expert, sorted by expert.
//
// A cluster of two blocks takes pair after pair of tiles, and each block one of them: 128 pairs of
// an expert, and 256 rows of its matrix (of gate and up 128 each). If both tiles are of one expert,
// each block loads half of the matrix for both. Blocks of a cluster are neighbours, so L2 is also
// asked once for what both read at about the same time.
//
// One warp loads the matrix by the copy engine, a step of 128 bytes of rows after the other, into a
// ring of W_STAGES. The inputs have a ring of X_STAGES. Inner values lie in the pairs' order, so
// that the copy engine loads them too. Rows of x lie apart: two warps copy them. Two warpgroups
// multiply 64 pairs each. One that has no pair in a tile leaves the tensor cores to the other.
//
// Numbers are in 16 bits, or both operands are in e4m3, and each 128 inputs of a row have a scale.
// Hopper's tensor cores keep about 14 bits of a sum of such products, so each step has a sum of its
// own, which is scaled and added in float32.
//
// The compiler is given: GATED (1 for gate and up, which end in the activation), EIGHT (1 for e4m3),
// ROW_SCALES (1 if a row of an e4m3 matrix has one scale, 0 if 128 x 128 numbers have one), W_STAGES,
// X_STAGES, HALF (0: bfloat16, 1: float16), GELU, CLAMPED with ALPHA and LIMIT, WITH_BIAS, CHOSEN
// (experts of a token).
#include "expert_results.cuh"
#include "tile_rings.cuh"

constexpr int PAIRS = ROWS;
constexpr int OUTPUTS = GATED ? COLUMNS / 2 : COLUMNS;
// Rows and columns of a matrix that share a scale, and inner values that do.
[[maybe_unused]] constexpr int BLOCK = 128;
// Registers of a thread that loads, and of one that multiplies.
constexpr int LOADING = EIGHT ? 40 : 88, MULTIPLYING = EIGHT ? 232 : 208;
// Threads that copy rows of x. Eight copy 128 bytes of a row, and each has some of the rows.
constexpr int COPYING = 64, BESIDE = COPYING / 8, EACH = PAIRS / BESIDE;
using Block = Rings<GATED ? COPYING : 1>;

struct Sizes {
    // Pairs, bytes of a row of inputs, outputs of a product, and the tiles of its outputs.
    int pairs, row_bytes, outputs, parts;
};

// Scales of e4m3: of inputs [rows, steps], of matrices, and of the inner values that are written.
struct Scales {
    const float *x, *w;
    float* inner;
};

// What a block of a cluster of two works on: two tiles of pairs, one each, and the same columns.
struct Item {
    int tile, column, expert;
    // Whether both have the same expert, so that each loads half of the matrix for both.
    bool together;
    // Whether there is no tile for this block. It loads the other's, and multiplies nothing.
    bool missing;

    // Places behind the last one may be asked for.
    __device__ __forceinline__ Item(
        int place, int rank, const Sizes& sizes, const int* experts, int used) {
        const int both = place / sizes.parts * 2;
        column = place % sizes.parts * OUTPUTS;
        missing = both + rank >= used;
        tile = min(both + rank, used - 1);
        expert = experts[tile];
        together = expert == experts[min(both + 1 - rank, used - 1)];
    }
};

// Copies a step of the rows of x of a tile's pairs, in the copy engine's pattern for 128 bytes a row.
// begins: where the rows of this thread begin, in bytes.
__device__ __forceinline__ void copy_rows(
    const char* x, const u32 (&begins)[EACH], int row_bytes, u32 target, int step) {
    const int piece = threadIdx.x % 8, row = threadIdx.x % COPYING / 8;
    const int at = step * ROW_BYTES + piece * 16;
    const char* source = x + (at < row_bytes ? at : 0);
    target += row * ROW_BYTES + ((piece ^ row % 8) << 4);
#pragma unroll
    for (int i = 0; i < EACH; i++)
        copy_16(
            target + i * BESIDE * ROW_BYTES, source + begins[i], at < row_bytes ? 16 : 0);
}

#if EIGHT
// Returns the sums of a tile. x: where the scales of the inputs' two rows begin. w: the matrix's
// scales of the first step, of its two halves; there are `across` in a step.
__device__ __forceinline__ void multiply_tile(
    float (&sum)[SUMS], Block& rings, int own, int steps, const Scales& scales, u32 (&x)[2],
    u32 (&w)[2], int across) {
    float product[AT_ONCE];
#pragma unroll
    for (int i = 0; i < SUMS; i++) sum[i] = 0.0f;
    for (int step = 0; step < steps; step++) {
        float rows[2], blocks[2] = {1.0f, 1.0f};
        for (int i = 0; i < 2; i++) {
            rows[i] = __ldg(scales.x + x[i]), x[i]++;
            if (!ROW_SCALES) blocks[i] = __ldg(scales.w + w[i]), w[i] += across;
        }
        rings.wait();
        if (GATED) shared_memory_fence();
#pragma unroll
        for (int part = 0; part < 2; part++) {
            begin(product, rings, own, part * COLUMNS / 2, false);
            wgmma_wait<0>();
            hold(product);
            if (part == 1) rings.release(rings.w_at.slot, rings.x_at.slot);
            const float factors[2] = {rows[0] * blocks[part], rows[1] * blocks[part]};
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                sum[part * AT_ONCE + i] += product[i] * factors[i / 2 % 2];
        }
        rings.next();
    }
}
#endif

extern "C" __global__ void __launch_bounds__(384, 1) __cluster_dims__(2, 1, 1) expert_products(
    const __grid_constant__ TileMap x_map, const __grid_constant__ TileMap w_map, const char* x,
    const __grid_constant__ Scales scales, const u16* __restrict__ bias,
    const int* __restrict__ order, const int* __restrict__ experts, const int* used_tiles,
    void* out, const __grid_constant__ Sizes sizes) {
    extern __shared__ __align__(1024) char memory[];
    __shared__ __align__(8) u64 barriers[2 * (W_STAGES + X_STAGES)];
    // Where rows of x begin: of the tile that is loading, and of the next one.
    __shared__ __align__(16) u32 begins[2][BESIDE][EACH];
    Block rings(memory, barriers);
    const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int rank = cluster_rank();
    if (threadIdx.x == 0) rings.init();
    cluster_sync();
    wait_for_kernels_before();
    let_next_kernel_start();
    const int used = *used_tiles, total = (used + 1) / 2 * sizes.parts;
    const int first = blockIdx.x / 2, clusters = gridDim.x / 2;
    const int steps = (sizes.row_bytes + ROW_BYTES - 1) / ROW_BYTES;

    if (warpgroup == 2) {
        fewer_registers<LOADING>();
        if (warp == 2 && lane == 0 && first < total) {
            Item later(first, rank, sizes, experts, used);
            for (int place = first; place < total; place += clusters) {
                const Item item = later;
                // The next tile's expert is read while this one is loading.
                later = Item(place + clusters, rank, sizes, experts, used);
                // The second half of the matrix's rows: those of up, or the next outputs.
                const int row = item.expert * (GATED + 1) * sizes.outputs + item.column;
                const int second = row + (GATED ? sizes.outputs : COLUMNS / 2);
                for (int step = 0; step < steps; step++) {
                    const int column = step * STEP;
                    const u32 target = rings.expect_w(), barrier = rings.w_is_full();
                    if (item.together) {
                        load_tile<true>(
                            &w_map, target + rank * (W_BYTES / 2), barrier, column,
                            rank ? second : row, 3);
                    } else {
                        load_tile<false>(&w_map, target, barrier, column, row, 0);
                        load_tile<false>(
                            &w_map, target + W_BYTES / 2, barrier, column, second, 0);
                    }
                    rings.w_at.next();
                }
            }
        } else if (!GATED && warp == 3 && lane == 0) {
            for (int place = first; place < total; place += clusters) {
                const Item item(place, rank, sizes, experts, used);
                rings.load_x(&x_map, item.tile * PAIRS, steps);
            }
        } else if (GATED && warp < COPYING / 32 && first < total) {
            int turn = 0;
            // Writes where the rows of a tile's pairs begin. Those of a thread are neighbours.
            auto write = [&](int place, int turn) {
                const int tile = min(place / sizes.parts * 2 + rank, used - 1);
                for (int i = threadIdx.x % COPYING; i < PAIRS; i += COPYING) {
                    const int token = min(order[tile * PAIRS + i], sizes.pairs - 1) / CHOSEN;
                    begins[turn][i % BESIDE][i / BESIDE] = u32(token) * sizes.row_bytes;
                }
            };
            write(first, turn);
            for (int place = first; place < total; place += clusters) {
                // All have written this tile's rows, and have read those of the tile before.
                named_sync<COPYING>(1);
                u32 own[EACH];
#pragma unroll
                for (int i = 0; i < EACH; i++) own[i] = begins[turn][threadIdx.x % COPYING / 8][i];
                write(place + clusters, turn ^ 1);
                for (int step = 0; step < steps; step++) {
                    const int slot = rings.x_at.slot;
                    barrier_wait(rings.x_empty + 8 * slot, rings.x_at.phase ^ 1);
                    copy_rows(x, own, sizes.row_bytes, rings.x + slot * X_BYTES, step);
                    arrive_when_copied(rings.x_full + 8 * slot);
                    rings.x_at.next();
                }
                turn ^= 1;
            }
        }
    } else {
        more_registers<MULTIPLYING>();
        const int own = warpgroup * 64, row = own + warp * 16 + lane / 4;
        // The first pair of this warpgroup in the tile that comes next.
        int coming = 0;
        auto read_coming = [&](int place) {
            coming = order[min(place / sizes.parts * 2 + rank, used - 1) * PAIRS + own];
        };
        if (first < total) read_coming(first);
        for (int place = first; place < total; place += clusters) {
            const Item item(place, rank, sizes, experts, used);
            const bool busy = !item.missing && coming < sizes.pairs;
            read_coming(place + clusters);
            if (!busy) {
                rings.skip(steps);
                continue;
            }
            const int rows[2] = {item.tile * PAIRS + row, item.tile * PAIRS + row + 8};
            const int pairs[2] = {order[rows[0]], order[rows[1]]};
            const u64 matrix_row = u64(item.expert) * (GATED + 1) * sizes.outputs;
            const Columns columns = {scales.w + matrix_row, bias + matrix_row, sizes.outputs};
            float sum[SUMS];
#if EIGHT
            u32 x_scales[2];
            for (int i = 0; i < 2; i++)
                x_scales[i] =
                    u32(GATED ? min(pairs[i], sizes.pairs - 1) / CHOSEN : rows[i]) * steps;
            // Blocks of 128 rows: of gate and up, or the last one again where there is no other.
            const int across = (GATED + 1) * sizes.outputs / BLOCK, block = item.column / BLOCK;
            const int second = GATED ? sizes.outputs / BLOCK + block : min(block + 1, across - 1);
            const u32 blocks = item.expert * steps * across;
            u32 w_scales[2] = {blocks + block, blocks + second};
            multiply_tile(sum, rings, own, steps, scales, x_scales, w_scales, across);
#else
            multiply_tile(sum, rings, own, steps);
#endif
#if EIGHT && GATED
            // Inner values are filled up to whole blocks.
            unsigned char* targets[2];
            float* inner_scales[2];
            for (int i = 0; i < 2; i++) {
                const u64 at = u64(rows[i]) * sizes.parts + item.column / BLOCK;
                targets[i] = static_cast<unsigned char*>(out) + at * BLOCK;
                inner_scales[i] = scales.inner + at;
            }
            write_codes(sum, targets, inner_scales, item.column, columns);
#else
            u16* targets[2];
            for (int i = 0; i < 2; i++) {
                const bool inside = GATED || pairs[i] < sizes.pairs;
                const u64 at = GATED ? rows[i] : pairs[i];
                targets[i] = inside ? static_cast<u16*>(out) + at * sizes.outputs : nullptr;
            }
            write_numbers<OUTPUTS>(sum, targets, item.column, columns);
#endif
        }
    }
    // A block's memory must stay until the other has written and arrived there.
    cluster_sync();
}
