// x W^T for more rows of x than a decoding product takes, where W is in codes of four bits.
//
// A block computes W x^T for tiles of 128 rows of W and TOKENS rows of x. Two warps load steps of 128
// columns into a ring: the copy engine brings codes and x, the second warp scales. Two warpgroups
// decode 64 rows of W each, in registers, from which the tensor cores take their first operand. They
// decode 16 columns while the tensor cores work on those before.
//
// A cluster of two blocks has two tiles of W and the same rows of x, of which each block loads half
// for both. All steps of all tiles are dealt out evenly: a cluster may end in the middle of a tile,
// and the next one goes on there (stream-K, Osama et al. 2023). Such parts go through memory, and
// the cluster that began the tile adds them in their order.
//
// With GATED, W is a gate's matrix over another one, a tile has 64 rows of each, and the result is
// silu(gate) * up. A thread has sums of both, so nothing is exchanged.
//
// The compiler is given: TOKENS, STAGES, HALF (0: bfloat16, 1: float16), ZEROS (1 if the lowest four
// bits of a scale are its group's zero, which is else 8), GROUP (columns that share a scale, a
// multiple of 128, or 0 for all), GATED, WITH_BIAS.
#include "int4.cuh"
#include "wgmma.cuh"

constexpr int ROWS = 128, STEP = 128;
constexpr int W_BYTES = ROWS * STEP / 2, X_BYTES = TOKENS * STEP * 2, STAGE_BYTES = W_BYTES + X_BYTES;
// The copy engine's pattern has 64 columns of x, so a step has two boxes.
constexpr int BOX_BYTES = X_BYTES / 2, PART = TOKENS / 2;
// Scales of a step lie behind the ring. A step is there when its bytes are, and 32 threads' scales.
constexpr int SCALES_BYTES = 4 * ROWS, ARRIVALS = 1 + (GROUP ? 32 : 0);
constexpr int SUMS = TOKENS / 2;
// Products of a step, of 16 columns each, and those of a thread that the tensor cores may have.
constexpr int PRODUCTS = STEP / 16, PENDING = 3;
// Columns of the result of a tile. The two rows of W of which a thread has sums are APART.
constexpr int WIDTH = GATED ? ROWS / 2 : ROWS, APART = GATED ? ROWS / 2 : 8;
constexpr int LOADING = 40, MULTIPLYING = 232;
constexpr int THREADS = 256;  // that multiply

static_assert(PART % 8 == 0 && TOKENS <= 256, "tiles");

struct Sizes {
    // outputs: columns of the result.
    int tokens, outputs, steps;
    // Tiles of x, and pairs of tiles of W.
    int token_tiles, pairs;
    int out_stride, height, groups, across;
};

// A part of a tile: the steps from `first` on.
struct Item {
    int token, column, first, steps;
    // Clusters that share the tile, and which of them this is.
    int tile, shares, share;
};

// Keeps the compiler from computing an address again and again.
__device__ __forceinline__ u32 kept(u32 address) {
    asm volatile("" : "+r"(address));
    return address;
}

// The steps of a cluster among all, and where a block stands in them.
struct Walk {
    const Sizes& sizes;
    int cluster, clusters, rank, at, end;

    __device__ __forceinline__ Walk(const Sizes& sizes) : sizes(sizes) {
        // A cluster waits for those behind it in the order of steps. These start before it.
        clusters = gridDim.x / 2, cluster = clusters - 1 - blockIdx.x / 2, rank = cluster_rank();
        at = int(all() * cluster / clusters), end = int(all() * (cluster + 1) / clusters);
    }

    __device__ __forceinline__ u64 all() const {
        return u64(sizes.pairs) * sizes.token_tiles * sizes.steps;
    }

    // Returns the cluster that has a step.
    __device__ __forceinline__ int cluster_of(int step) const {
        return int(((u64(step) + 1) * clusters - 1) / all());
    }

    __device__ __forceinline__ bool goes_on() const { return at < end; }

    __device__ __forceinline__ Item item() const {
        Item item;
        item.tile = at / sizes.steps, item.first = at % sizes.steps;
        item.steps = min(sizes.steps - item.first, end - at);
        item.token = item.tile % sizes.token_tiles * TOKENS;
        item.column = (item.tile / sizes.token_tiles * 2 + rank) * WIDTH;
        const int from = cluster_of(item.tile * sizes.steps);
        item.shares = cluster_of(item.tile * sizes.steps + sizes.steps - 1) - from + 1;
        item.share = cluster - from;
        return item;
    }
};

// The ring in shared memory, its barriers, and the slot where a thread stands.
struct Ring : Place<STAGES> {
    u32 memory, scales, full, empty;

    __device__ __forceinline__ Ring(char* given, u64* barriers) {
        memory = kept(shared_address(given)), scales = memory + STAGES * STAGE_BYTES;
        full = kept(shared_address(barriers)), empty = full + 8 * STAGES;
    }

    __device__ __forceinline__ void init() const {
        for (int slot = 0; slot < STAGES; slot++) {
            barrier_init(full + 8 * slot, ARRIVALS);
            // All warps that multiply, of both blocks.
            barrier_init(empty + 8 * slot, 16);
        }
        barrier_init_done();
    }

    __device__ __forceinline__ u32 x() const { return memory + slot * STAGE_BYTES; }
    __device__ __forceinline__ u32 is_full() const { return full + 8 * slot; }

    __device__ __forceinline__ void wait_until_empty() const {
        barrier_wait(empty + 8 * slot, phase ^ 1);
    }
    __device__ __forceinline__ void wait_until_full() const { barrier_wait(is_full(), phase); }

    // Lets the loading warps of both blocks fill the slot of so many steps before this one.
    __device__ __forceinline__ void release_before(int steps) const {
        const int lane = threadIdx.x % 32, before = slot - steps + (slot < steps ? STAGES : 0);
        if (lane < 2) barrier_arrive(empty + 8 * before, lane);
    }
};

// Returns a row of W of a tile.
__device__ __forceinline__ int row_of(int place, const Item& item, const Sizes& sizes) {
    const int column = min(item.column + place % WIDTH, sizes.outputs - 1);
    return column + (GATED && place >= WIDTH ? sizes.outputs : 0);
}

// Returns where the scale of a row is in a step.
__device__ __forceinline__ int place_of_scale(int row, int step, const Sizes& sizes) {
    const int group = GROUP ? min(step / (GROUP ? GROUP / STEP : 1), sizes.groups - 1) : 0;
    return group * sizes.across + row / sizes.height;
}

// A group's scale twice in 16 bits, and the offset of its numbers.
struct Scale {
    u32 factor, offset;

    __device__ __forceinline__ explicit Scale(float given) : offset(offset_of(given)) {
        const float clean = without_zero(given);
        factor = GROUP ? packed(clean, clean) : 0;
    }

    // Returns two numbers of a word of eight codes.
    __device__ __forceinline__ u32 decoded(u32 word, int place) const {
        const u32 numbers = of_int4(word, place, offset);
        return GROUP ? multiplied(numbers, factor) : numbers;
    }
};

// Codes of a step of two rows of W, and their scales.
struct Codes {
    uint4 low, high;
    float scales[2];

    __device__ __forceinline__ u32 word(int i, bool upper) const {
        return word_of(upper ? high : low, i);
    }
};

// Decodes the codes of 16 columns, the k-th of a step.
__device__ __forceinline__ void decode(
    u32 (&numbers)[4], const Codes& codes, int k, const Scale (&scale)[2]) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int i = 0; i < 2; i++)
            numbers[2 * half + i] = scale[i].decoded(codes.word(k / 2, i), 2 * (k % 2) + half);
}

// Keeps registers that the tensor cores read from being used for something else before this place.
__device__ __forceinline__ void hold_numbers(u32 (&numbers)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) asm volatile("" : "+r"(numbers[i])::"memory");
}

__device__ __forceinline__ float activated(float gate, float up) {
    return silu(rounded(gate)) * rounded(up);
}

// Writes the results of a tile. A thread has two neighbouring rows of x of each 8, of two rows of W.
// place: the first of the warp's rows of W in the tile.
__device__ __forceinline__ void finish(
    const float (&sum)[SUMS], const Item& item, int place, const Sizes& sizes,
    const float (&factors)[2], const u16* bias, u16* out) {
    const int lane = threadIdx.x % 32, quad = lane % 4;
    float added[2] = {0.0f, 0.0f};
    if (WITH_BIAS)
        for (int i = 0; i < 2; i++)
            added[i] = widened(bias[row_of(place + lane / 4 + i * APART, item, sizes)]);
    const int column = item.column + place + (GATED ? 2 * quad : 8 * (quad / 2) + 4 * (quad & 1));
    const int token = item.token + lane / 4;
    u16* target = out + u64(token) * sizes.out_stride + column;
#pragma unroll
    for (int j = 0; j < TOKENS / 8; j++, target += 8 * u64(sizes.out_stride)) {
        float value[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            value[i] = sum[4 * j + i] * (GROUP ? 1.0f : without_zero(factors[i / 2])) + added[i / 2];
        const bool inside = token + 8 * j < sizes.tokens && column < sizes.outputs;
        if (GATED) {
            const u32 both = transposed(
                packed(activated(value[0], value[2]), activated(value[1], value[3])));
            if (inside) *reinterpret_cast<u32*>(target) = both;
        } else {
            const uint2 four = four_columns(
                transposed(packed(value[0], value[1])), transposed(packed(value[2], value[3])));
            if (inside) *reinterpret_cast<uint2*>(target) = four;
        }
    }
}

// Leaves a part of a tile for the cluster that began it.
__device__ __forceinline__ void leave(const float (&sum)[SUMS], float* part, int* counter) {
#pragma unroll
    for (int i = 0; i < SUMS; i += 4)
        __stcg(
            reinterpret_cast<float4*>(part + i * THREADS) + threadIdx.x,
            make_float4(sum[i], sum[i + 1], sum[i + 2], sum[i + 3]));
    __threadfence();
    named_sync<THREADS>(1);
    if (threadIdx.x == 0) atomicAdd(counter, 1);
}

// Adds the parts of the clusters that went on with a tile, in their order.
__device__ __forceinline__ void gather(
    float (&sum)[SUMS], const float* part, int shares, u64 stride, int* counter) {
    if (threadIdx.x == 0) {
        while (atomicAdd(counter, 0) < shares - 1) {}
        *counter = 0;
        __threadfence();
    }
    named_sync<THREADS>(1);
    for (int share = 1; share < shares; share++, part += stride)
#pragma unroll
        for (int i = 0; i < SUMS; i += 4) {
            const float4 four =
                __ldcg(reinterpret_cast<const float4*>(part + i * THREADS) + threadIdx.x);
            sum[i] += four.x, sum[i + 1] += four.y, sum[i + 2] += four.z, sum[i + 3] += four.w;
        }
}

// Loads codes and x, as one thread.
struct Loader {
    const TileMap &x_map, &w_map;
    const Sizes& sizes;
    int rank;

    __device__ __forceinline__ void load_w(const Ring& ring, const Item& item, int step) const {
        barrier_expect(ring.is_full(), STAGE_BYTES);
        for (int box = 0; box < 1 + GATED; box++)
            load_tile<false>(
                &w_map, ring.x() + X_BYTES + box * (W_BYTES / 2), ring.is_full(),
                (item.first + step) * (STEP / 2), item.column + box * sizes.outputs, 0);
    }

    __device__ __forceinline__ void load_x(const Ring& ring, const Item& item, int step) const {
        for (int box = 0; box < 2; box++)
            load_tile<true>(
                &x_map, ring.x() + box * BOX_BYTES + rank * PART * 128, ring.is_full(),
                (item.first + step) * STEP + box * 64, item.token + rank * PART, 3);
    }

    __device__ __forceinline__ void run(Ring ring, Walk walk) const {
        // Codes come first: another kernel may still write x.
        Item item = walk.item();
        const int early = min(STAGES, walk.goes_on() ? item.steps : 0);
        Ring first = ring;
        for (int i = 0; i < early; i++, first.next()) load_w(first, item, i);
        wait_for_kernels_before();
        let_next_kernel_start();
        for (int i = 0; i < early; i++, ring.next()) load_x(ring, item, i);
        for (int done = early; walk.goes_on(); walk.at += item.steps, done = 0) {
            item = walk.item();
            for (; done < item.steps; done++, ring.next()) {
                ring.wait_until_empty();
                load_w(ring, item, done);
                load_x(ring, item, done);
            }
        }
    }
};

// Loads scales, as a warp.
__device__ __forceinline__ void load_scales(Ring ring, Walk walk, const float* scales) {
    const int lane = threadIdx.x % 32;
    while (walk.goes_on()) {
        const Item item = walk.item();
        for (int i = 0; i < item.steps; i++, walk.at++, ring.next()) {
            ring.wait_until_empty();
            const u32 target = ring.scales + ring.slot * SCALES_BYTES;
#pragma unroll
            for (int row = lane; row < ROWS; row += 32)
                copy_4(
                    target + 4 * row,
                    scales + place_of_scale(
                                 row_of(row, item, walk.sizes), item.first + i, walk.sizes));
            arrive_when_copied(ring.is_full());
        }
    }
}

// A thread that multiplies.
struct Multiplier {
    Ring ring;
    // Where the codes and scales of its first row are, in the first slot.
    u32 codes, scales;
    // Scales of its two rows, where all columns share them.
    float factors[2] = {1.0f, 1.0f};

    __device__ __forceinline__ Multiplier(const Ring& ring, int row) : ring(ring) {
        codes = kept(ring.memory + X_BYTES + row * (STEP / 2) + threadIdx.x % 4 * 16);
        scales = kept(ring.scales + 4 * row);
    }

    // Waits for a step and returns its codes.
    __device__ __forceinline__ Codes next_codes() const {
        const u32 place = codes + ring.slot * STAGE_BYTES;
        const u32 given = scales + ring.slot * SCALES_BYTES;
        ring.wait_until_full();
        Codes found{four_words(place), four_words(place + APART * (STEP / 2))};
        for (int i = 0; i < 2; i++)
            found.scales[i] = GROUP ? number(given + 4 * APART * i) : factors[i];
        return found;
    }

    // Computes the sums of some steps.
    __device__ __forceinline__ void run(float (&sum)[SUMS], int steps) {
        u32 numbers[PRODUCTS][4];
        Codes now = next_codes();
        for (int step = 0; step < steps; step++) {
            const Scale scale[2] = {Scale(now.scales[0]), Scale(now.scales[1])};
            const u64 x_tile = rows_of_128(ring.x());
            Codes coming = now;
            ring.next();
#pragma unroll
            for (int k = 0; k < PRODUCTS; k++) {
                decode(numbers[k], now, k, scale);
                hold(sum), hold_numbers(numbers[k]);
                wgmma_fence();
                multiply(
                    sum, numbers[k], x_tile + k / 4 * (BOX_BYTES / 16) + k % 4 * 2, step + k > 0);
                wgmma_commit();
                wgmma_wait<PENDING>();
                if (k == PENDING) {
                    // All products of the step before are done.
                    if (step > 0) ring.release_before(2);
                    if (step + 1 < steps) coming = next_codes();
                }
            }
            now = coming;
        }
        wgmma_wait<0>();
        hold(sum);
        ring.release_before(1);
    }
};

extern "C" __global__ void __launch_bounds__(384, 1) __cluster_dims__(2, 1, 1) coded_product(
    const __grid_constant__ TileMap x_map, const __grid_constant__ TileMap w_map,
    const float* __restrict__ scales, const u16* __restrict__ bias, u16* out, float* partials,
    int* counters, const __grid_constant__ Sizes sizes) {
    extern __shared__ __align__(1024) char memory[];
    __shared__ __align__(8) u64 barriers[2 * STAGES];
    const Ring ring(memory, barriers);
    if (threadIdx.x == 0) ring.init();
    cluster_sync();
    Walk walk(sizes);

    if (threadIdx.x >= THREADS) {
        fewer_registers<LOADING>();
        if (threadIdx.x == THREADS)
            Loader{x_map, w_map, sizes, walk.rank}.run(ring, walk);
        else if (GROUP && threadIdx.x / 32 == THREADS / 32 + 1)
            load_scales(ring, walk, scales);
    } else {
        more_registers<MULTIPLYING>();
        wait_for_kernels_before();
        // The warp's first row of W in a tile, and the thread's.
        const int warp_row = threadIdx.x / 32 * (WIDTH / 8), own = warp_row + threadIdx.x % 32 / 4;
        Multiplier multiplier(ring, own);
        Item item;
        for (; walk.goes_on(); walk.at += item.steps) {
            item = walk.item();
            if (!GROUP)
                for (int i = 0; i < 2; i++)
                    multiplier.factors[i] = __ldg(
                        scales + place_of_scale(row_of(own + i * APART, item, sizes), 0, sizes));
            float sum[SUMS];
            multiplier.run(sum, item.steps);
            // What another cluster began goes there. A cluster leaves one such part, its first.
            const u64 stride = u64(2) * SUMS * THREADS;
            float* part = partials + walk.cluster * stride + walk.rank * (SUMS * THREADS);
            int* counter = counters + item.tile * 2 + walk.rank;
            if (item.share > 0) {
                leave(sum, part, counter);
                continue;
            }
            if (item.shares > 1) gather(sum, part + stride, item.shares, stride, counter);
            finish(sum, item, warp_row, sizes, multiplier.factors, bias, out);
        }
    }
    // A block's memory must stay until the other has written and arrived there.
    cluster_sync();
}
