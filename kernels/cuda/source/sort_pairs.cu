// Sorting of the pairs of a token and an expert by expert, in tiles of one expert.
//
// Each block has a share of the pairs, and each of its warps a part of that. Pairs of an expert keep
// their order, so a pair's place follows from counts: those of its expert's pairs in earlier shares,
// in the parts of earlier warps, and earlier in its part. While there are few pairs, each block
// counts all of them, which takes less time than another kernel. Else count_pairs counts those of
// each share. Atomic additions only count, so their order changes nothing.
//
// The compiler is given: WARPS (of a block).
#include "hopper.cuh"

constexpr int THREADS = 32 * WARPS;
// Rows of counts in shared memory behind those of the warps: of earlier shares and of later ones.
constexpr int EARLIER = WARPS, LATER = WARPS + 1, ROWS = WARPS + 2;
// Loads of 16 bytes of pairs, and of counts, that a thread waits for at once.
constexpr int PAIR_LOADS = 4, COUNT_LOADS = 8;

struct Sizes {
    // Pairs, those of a warp's part (a multiple of four), experts, pairs of a tile, and tiles that
    // there is room for.
    int pairs, part, experts, in_tile, tiles;

    // Returns whether a pair with this id is sorted. Ids of pairs that are left out are negative.
    __device__ __forceinline__ bool has(int expert) const { return u32(expert) < u32(experts); }

    // Returns the numbers of a row of counts, in whole words of 16 bytes.
    __device__ __forceinline__ int width() const { return (experts + 3) & ~3; }

    __device__ __forceinline__ int begin() const { return blockIdx.x * (WARPS * part); }

    __device__ __forceinline__ int stop() const { return min(begin() + WARPS * part, pairs); }

    __device__ __forceinline__ int tiles_of(int size) const {
        return (size + in_tile - 1) / in_tile;
    }
};

// The sorted pairs, as in kernels/experts/common/sorted_pairs.py.
struct Sorted {
    int *order, *experts, *used, *progress;
};

// ---- Counts ----

__device__ __forceinline__ void add_pair(int* row, int expert, const Sizes& sizes) {
    if (sizes.has(expert)) atomicAdd(row + expert, 1);
}

// Counts pairs from `begin`, a multiple of four, to before `stop`. row_of: returns the row of counts
// for a pair, the same one for each four.
template <class RowOf>
__device__ __forceinline__ void add_pairs(
    const int* ids, int begin, int stop, const Sizes& sizes, RowOf row_of) {
    const bool aligned = reinterpret_cast<u64>(ids) % 16 == 0;
    const int loads = aligned ? (stop - begin) / 4 : 0;
    for (int first = threadIdx.x; first < loads; first += PAIR_LOADS * THREADS) {
        int4 found[PAIR_LOADS];
#pragma unroll
        for (int i = 0; i < PAIR_LOADS; i++) {
            const int load = first + i * THREADS;
            if (load < loads) found[i] = *reinterpret_cast<const int4*>(ids + begin + 4 * load);
        }
#pragma unroll
        for (int i = 0; i < PAIR_LOADS; i++) {
            const int load = first + i * THREADS;
            if (load >= loads) break;
            int* row = row_of(begin + 4 * load);
            add_pair(row, found[i].x, sizes), add_pair(row, found[i].y, sizes);
            add_pair(row, found[i].z, sizes), add_pair(row, found[i].w, sizes);
        }
    }
    for (int pair = begin + 4 * loads + threadIdx.x; pair < stop; pair += THREADS)
        add_pair(row_of(pair), ids[pair], sizes);
}

// Adds four neighbouring counts of each share from `begin` to before `stop` to a row.
__device__ __forceinline__ void add_shares(
    const int* counts, int begin, int stop, int width, int* row) {
    if (begin >= stop) return;
    int4 sum = make_int4(0, 0, 0, 0);
    for (int first = begin; first < stop; first += COUNT_LOADS) {
        int4 found[COUNT_LOADS];
#pragma unroll
        for (int i = 0; i < COUNT_LOADS; i++) {
            const int4* place = reinterpret_cast<const int4*>(counts + (first + i) * width);
            found[i] = first + i < stop ? *place : make_int4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < COUNT_LOADS; i++) {
            sum.x += found[i].x, sum.y += found[i].y;
            sum.z += found[i].z, sum.w += found[i].w;
        }
    }
    atomicAdd(row, sum.x), atomicAdd(row + 1, sum.y);
    atomicAdd(row + 2, sum.z), atomicAdd(row + 3, sum.w);
}

// Adds the counts of the other shares. Threads have four experts and some neighbouring shares each.
__device__ __forceinline__ void add_other_shares(const int* counts, int width, int* rows) {
    const int shares = gridDim.x, own = blockIdx.x;
    const int fours = width / 4, groups = max(THREADS / fours, 1);
    const int at_once = (shares + groups - 1) / groups;
    for (int i = threadIdx.x; i < fours * groups; i += THREADS) {
        const int expert = i % fours * 4, begin = i / fours * at_once;
        const int stop = min(begin + at_once, shares);
        add_shares(counts + expert, begin, min(stop, own), width, rows + EARLIER * width + expert);
        add_shares(
            counts + expert, max(begin, own + 1), stop, width, rows + LATER * width + expert);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) count_pairs(
    const int* ids, int* counts, const __grid_constant__ Sizes sizes) {
    extern __shared__ __align__(16) int memory[];
    const int width = sizes.width();
    for (int i = threadIdx.x; i < width; i += THREADS) memory[i] = 0;
    __syncthreads();
    wait_for_kernels_before();
    let_next_kernel_start();
    add_pairs(ids, sizes.begin(), sizes.stop(), sizes, [&](int) { return memory; });
    __syncthreads();
    for (int i = threadIdx.x; i < width; i += THREADS)
        counts[blockIdx.x * width + i] = memory[i];
}

// ---- Places ----

// Returns the sum of `total` and of the values of earlier threads, and adds all values to `total`.
// sums: a number of shared memory for each warp.
__device__ __forceinline__ int sum_before(int value, int& total, int* sums) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int sum = value;
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        const int other = __shfl_up_sync(~0u, sum, apart);
        if (lane >= apart) sum += other;
    }
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    int before = total + sum - value;
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
        if (i < warp) before += sums[i];
        total += sums[i];
    }
    return before;
}

// Turns each warp's counts into the places of its first pairs. The first tiles and sizes of experts
// replace the counts of other shares. Returns the number of tiles.
__device__ __forceinline__ int find_places(int* rows, int* sums, const Sizes& sizes) {
    const int width = sizes.width();
    int used = 0;
    for (int i = 0; i < sizes.experts; i += THREADS) {
        int *column = rows + i + threadIdx.x, counts[ROWS], size = 0;
        const bool inside = i + int(threadIdx.x) < sizes.experts;
#pragma unroll
        for (int row = 0; row < ROWS; row++)
            size += counts[row] = inside ? column[row * width] : 0;
        const int first = sum_before(sizes.tiles_of(size), used, sums);
        if (inside) {
            int place = first * sizes.in_tile + counts[EARLIER];
#pragma unroll
            for (int warp = 0; warp < WARPS; warp++)
                column[warp * width] = place, place += counts[warp];
            column[EARLIER * width] = first, column[LATER * width] = size;
        }
        __syncthreads();
    }
    return used;
}

// Writes the pairs of a warp's part. places: where the next pair of each expert belongs.
__device__ __forceinline__ void write_pairs(
    const int* ids, int* places, int* order, const Sizes& sizes) {
    const int lane = threadIdx.x % 32, begin = sizes.begin() + threadIdx.x / 32 * sizes.part;
    const int stop = min(begin + sizes.part, sizes.pairs);
#pragma unroll 1
    for (int at = begin; at < stop; at += 32) {
        const int pair = at + lane, expert = pair < stop ? ids[pair] : -1;
        const u32 same = __match_any_sync(~0u, expert);
        const int earlier = __popc(same & ((1u << lane) - 1));
        const bool known = sizes.has(expert);
        if (known) order[places[expert] + earlier] = pair;
        __syncwarp();
        if (known && earlier == 0) places[expert] += __popc(same);
        __syncwarp();
    }
}

// Fills the experts' last tiles up, and writes the experts and the progress of all tiles.
__device__ __forceinline__ void write_tiles(
    const int* firsts, const int* totals, int used, const Sorted& out, const Sizes& sizes) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Neighbouring experts are those of different blocks.
    for (int expert = warp * gridDim.x + blockIdx.x; expert < sizes.experts;
         expert += WARPS * gridDim.x) {
        const int first = firsts[expert], size = totals[expert];
        const int stop = first + sizes.tiles_of(size);
#pragma unroll 1
        for (int i = first * sizes.in_tile + size + lane; i < stop * sizes.in_tile; i += 32)
            out.order[i] = sizes.pairs;
#pragma unroll 1
        for (int tile = first + lane; tile < stop; tile += 32)
            out.experts[tile] = expert, out.progress[1 + tile] = 0;
    }
    const int thread = blockIdx.x * THREADS + threadIdx.x;
#pragma unroll 1
    for (int tile = used + thread; tile < sizes.tiles; tile += THREADS * gridDim.x)
        out.experts[tile] = sizes.experts;
    if (thread == 0) *out.used = used, *out.progress = 0;
}

// counts: those of count_pairs, or null where the blocks count all pairs.
extern "C" __global__ void __launch_bounds__(THREADS) place_pairs(
    const int* ids, const int* counts, const __grid_constant__ Sorted out,
    const __grid_constant__ Sizes sizes) {
    extern __shared__ __align__(16) int memory[];
    // The experts' stream asks for matrices before its own wait.
    let_next_kernel_start();
    const int width = sizes.width(), begin = sizes.begin(), stop = sizes.stop();
    int *rows = memory, *sums = memory + ROWS * width;
    for (int i = threadIdx.x; i < ROWS * width; i += THREADS) rows[i] = 0;
    __syncthreads();
    wait_for_kernels_before();

    const bool alone = counts == nullptr;
    add_pairs(ids, alone ? 0 : begin, alone ? sizes.pairs : stop, sizes, [&](int pair) {
        const int own = pair < stop ? u32(pair - begin) / u32(sizes.part) : LATER;
        return rows + (pair < begin ? EARLIER : own) * width;
    });
    if (!alone) add_other_shares(counts, width, rows);
    __syncthreads();
    const int used = find_places(rows, sums, sizes);
    write_pairs(ids, rows + threadIdx.x / 32 * width, out.order, sizes);
    write_tiles(rows + EARLIER * width, rows + LATER * width, used, out, sizes);
}
