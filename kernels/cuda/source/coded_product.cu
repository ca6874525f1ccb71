// x W^T for more rows of x than a decoding product takes, where W is in codes of four bits.
//
// A block computes W x^T for tiles of 128 rows of W and TOKENS rows of x. One warp loads steps of 128
// columns into a ring: the copy engine brings codes and x. Two warpgroups decode 64 rows of W each,
// in registers, from which the tensor cores take their first operand. They decode half a step while
// the tensor cores work on the half before.
//
// A cluster of two blocks has two tiles of W and the same rows of x, of which each block loads half
// for both. All steps of all tiles are dealt out evenly: a cluster may end in the middle of a tile,
// and the next one goes on there (stream-K, Osama et al. 2023). Such parts go through memory, and
// the last cluster that arrives adds them in their order.
//
// The compiler is given: TOKENS, STAGES, HALF (0: bfloat16, 1: float16), ZEROS (1 if the lowest four
// bits of a scale are its group's zero, which is else 8), GROUP (columns that share a scale, a
// multiple of 128, or 0 for all), OUT (0 writes, 1 adds), WITH_BIAS.
#include "hopper.cuh"
#include "numbers.cuh"
#include "wgmma.cuh"

constexpr int ROWS = 128, STEP = 128;
constexpr int W_BYTES = ROWS * STEP / 2, X_BYTES = TOKENS * STEP * 2, STAGE_BYTES = W_BYTES + X_BYTES;
// The copy engine's pattern has 64 columns of x, so a step has two boxes.
constexpr int BOX_BYTES = X_BYTES / 2, PART = TOKENS / 2;
constexpr int SUMS = TOKENS / 2;
constexpr int LOADING = 40, MULTIPLYING = 232;
constexpr int THREADS = 256;  // that multiply

static_assert(PART % 8 == 0 && TOKENS <= 256, "tiles");

struct Sizes {
    int tokens, outputs, steps;
    // Tiles of x, and pairs of tiles of W.
    int token_tiles, pairs;
    int out_stride, height, groups, across;
};

// A part of a tile: the steps from `first` on.
struct Item {
    int token, row, first, steps;
    // Clusters that share the tile, and which of them this is.
    int tile, shares, share;
};

// The steps of a cluster among all.
struct Range {
    int begin, end;
};

__device__ __forceinline__ Range range_of(int cluster, int clusters, const Sizes& sizes) {
    const u64 all = u64(sizes.pairs) * sizes.token_tiles * sizes.steps;
    return {int(all * cluster / clusters), int(all * (cluster + 1) / clusters)};
}

// Returns the cluster that has a step.
__device__ __forceinline__ int cluster_of(int step, int clusters, const Sizes& sizes) {
    const u64 all = u64(sizes.pairs) * sizes.token_tiles * sizes.steps;
    return int(((u64(step) + 1) * clusters - 1) / all);
}

__device__ __forceinline__ Item item_of(
    int at, int end, int cluster, int clusters, int rank, const Sizes& sizes) {
    Item item;
    item.tile = at / sizes.steps, item.first = at % sizes.steps;
    item.steps = min(sizes.steps - item.first, end - at);
    item.token = item.tile % sizes.token_tiles * TOKENS;
    item.row = (item.tile / sizes.token_tiles * 2 + rank) * ROWS;
    const int from = cluster_of(item.tile * sizes.steps, clusters, sizes);
    item.shares = cluster_of(item.tile * sizes.steps + sizes.steps - 1, clusters, sizes) - from + 1;
    item.share = cluster - from;
    return item;
}

struct Ring {
    int slot = 0;
    u32 phase = 0;

    __device__ __forceinline__ void next() {
        if (++slot == STAGES) slot = 0, phase ^= 1;
    }
};

// A group's scale twice in 16 bits, and what is added to its numbers to take away their offset.
struct Scale {
    u32 factor, less;

    __device__ __forceinline__ explicit Scale(float given) {
        const u32 bits = __float_as_uint(given);
        const u32 zero = ZEROS ? bits & 15 : 8;
        const float clean = ZEROS ? __uint_as_float(bits & ~15u) : given;
        factor = GROUP ? packed(clean, clean) : 0;
        // -128 or -1024, whose lowest bit counts 1, twice.
        less = (HALF ? 0xE400E400 : 0xC300C300) + zero * 0x00010001;
    }
};

// Returns two numbers of a word of eight codes, of which `place` says which.
__device__ __forceinline__ u32 decoded(u32 word, int place, const Scale& scale) {
    u32 bits;
    asm("lop3.b32 %0, %1, 0x000F000F, %2, 0xEA;"
        : "=r"(bits)
        : "r"(word >> (4 * place)), "n"(HALF ? 0x64006400 : 0x43004300));
    if (HALF) {
        asm("add.rn.f16x2 %0, %0, %1;" : "+r"(bits) : "r"(scale.less));
        if (GROUP) asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(bits) : "r"(scale.factor));
    } else {
        asm("add.rn.bf16x2 %0, %0, %1;" : "+r"(bits) : "r"(scale.less));
        if (GROUP) asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(bits) : "r"(scale.factor));
    }
    return bits;
}

// Decodes the codes of 64 columns: two words of each of two rows, for four products of 16 columns.
__device__ __forceinline__ void decode(
    u32 (&numbers)[16], u32 low0, u32 low1, u32 high0, u32 high1, const Scale (&scale)[2]) {
    const u32 low[2] = {low0, low1}, high[2] = {high0, high1};
#pragma unroll
    for (int word = 0; word < 2; word++)
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int at = 8 * word + 4 * j + 2 * half, place = 2 * j + half;
                numbers[at] = decoded(low[word], place, scale[0]);
                numbers[at + 1] = decoded(high[word], place, scale[1]);
            }
}

// Keeps registers that the tensor cores read from being used for something else before this place.
__device__ __forceinline__ void hold_numbers(u32 (&numbers)[16]) {
#pragma unroll
    for (int i = 0; i < 16; i++) asm volatile("" : "+r"(numbers[i])::"memory");
}

// Transposes 8 x 8 numbers of 16 bits, of which each thread has a word.
__device__ __forceinline__ u32 transposed(u32 word) {
    u32 found;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(found) : "r"(word));
    return found;
}

// Writes the sums of a tile, or adds them. A thread has two neighbouring rows of x of each 8, of two
// rows of W that are 8 apart.
__device__ __forceinline__ void finish(
    const float (&sum)[SUMS], const Item& item, int row, const Sizes& sizes,
    const float (&factors)[2], const u16* bias, u16* out) {
    const int lane = threadIdx.x % 32, quad = lane % 4;
    float added[2] = {0.0f, 0.0f};
    if (WITH_BIAS)
        for (int i = 0; i < 2; i++)
            if (row + lane / 4 + 8 * i < sizes.outputs) added[i] = widened(bias[row + lane / 4 + 8 * i]);
    const int n = row + 8 * (quad / 2) + 4 * (quad & 1);
#pragma unroll
    for (int j = 0; j < TOKENS / 8; j++) {
        u32 high[2], low[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float first = sum[4 * j + 2 * i], second = sum[4 * j + 2 * i + 1];
            if (!GROUP) first *= factors[i], second *= factors[i];
            first += added[i], second += added[i];
            const u32 word = packed(first, second);
            high[i] = transposed(word);
            // The rest of the sums, so that little is lost before the stream is added.
            if (OUT)
                low[i] = transposed(
                    packed(first - widened(word & 0xFFFF), second - widened(word >> 16)));
        }
        const int token = item.token + 8 * j + lane / 4;
        const bool inside = token < sizes.tokens && n < sizes.outputs;
        uint2* target = reinterpret_cast<uint2*>(out + u64(token) * sizes.out_stride + n);
        uint2 found = four_columns(high[0], high[1]);
        if (OUT) {
            const uint2 rest = four_columns(low[0], low[1]);
            const uint2 before = inside ? *target : make_uint2(0, 0);
            auto summed = [](u32 a, u32 b, u32 c) {
                return packed(
                    widened(a & 0xFFFF) + widened(b & 0xFFFF) + widened(c & 0xFFFF),
                    widened(a >> 16) + widened(b >> 16) + widened(c >> 16));
            };
            found = make_uint2(
                summed(found.x, rest.x, before.x), summed(found.y, rest.y, before.y));
        }
        if (inside) *target = found;
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) __cluster_dims__(2, 1, 1) coded_product(
    const __grid_constant__ TileMap x_map, const __grid_constant__ TileMap w_map,
    const float* __restrict__ scales, const u16* __restrict__ bias, u16* out, float* partials,
    int* counters, const __grid_constant__ Sizes sizes) {
    extern __shared__ __align__(1024) char memory[];
    __shared__ __align__(8) u64 barriers[2 * STAGES];
    __shared__ int arrived;
    const u32 ring_at = shared_address(memory);
    const u32 full = shared_address(barriers), empty = full + 8 * STAGES;
    const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;
    const int rank = cluster_rank();
    const int cluster = blockIdx.x / 2, clusters = gridDim.x / 2;
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < STAGES; slot++) {
            barrier_init(full + 8 * slot, 1);
            barrier_init(empty + 8 * slot, 16);
        }
        barrier_init_done();
    }
    cluster_sync();
    const Range range = range_of(cluster, clusters, sizes);

    if (warpgroup == 2) {
        fewer_registers<LOADING>();
        if (threadIdx.x == THREADS) {
            Ring ring;
            auto load_w = [&](int slot, int row, int step) {
                load_tile<false>(
                    &w_map, ring_at + slot * STAGE_BYTES + X_BYTES, full + 8 * slot,
                    step * (STEP / 2), row, 0);
            };
            auto load_x = [&](int slot, int token, int step) {
                for (int box = 0; box < 2; box++)
                    load_tile<true>(
                        &x_map,
                        ring_at + slot * STAGE_BYTES + box * BOX_BYTES + rank * PART * 128,
                        full + 8 * slot, step * STEP + box * 64, token + rank * PART, 3);
            };
            // Codes come first: another kernel may still write x.
            Item item = item_of(range.begin, range.end, cluster, clusters, rank, sizes);
            const int early = min(STAGES, range.begin < range.end ? item.steps : 0);
            for (int i = 0; i < early; i++) {
                barrier_expect(full + 8 * i, STAGE_BYTES);
                load_w(i, item.row, item.first + i);
            }
            wait_for_kernels_before();
            let_next_kernel_start();
            for (int i = 0; i < early; i++) {
                load_x(i, item.token, item.first + i);
                ring.next();
            }
            int done = early;
            for (int at = range.begin; at < range.end; at += item.steps) {
                item = item_of(at, range.end, cluster, clusters, rank, sizes);
                for (; done < item.steps; done++) {
                    barrier_wait(empty + 8 * ring.slot, ring.phase ^ 1);
                    barrier_expect(full + 8 * ring.slot, STAGE_BYTES);
                    load_w(ring.slot, item.row, item.first + done);
                    load_x(ring.slot, item.token, item.first + done);
                    ring.next();
                }
                done = 0;
            }
        }
    } else {
        more_registers<MULTIPLYING>();
        wait_for_kernels_before();
        Ring ring;
        const int own = warpgroup * 64 + threadIdx.x % 128 / 32 * 16;
        auto release = [&](int slot) {
            if (lane < 2) barrier_arrive(empty + 8 * slot, lane);
        };
        Item item;
        for (int at = range.begin; at < range.end; at += item.steps) {
            item = item_of(at, range.end, cluster, clusters, rank, sizes);
            const int row = item.row + own + lane / 4;
            // Where the scales of two rows are, among those of a group.
            const int places[2] = {
                min(row, sizes.outputs - 1) / sizes.height,
                min(row + 8, sizes.outputs - 1) / sizes.height};
            auto given = [&](int step, int i) {
                const int group = GROUP ? min(step / (GROUP ? GROUP / STEP : 1), sizes.groups - 1) : 0;
                return __ldg(scales + group * sizes.across + places[i]);
            };
            float coming[2] = {given(item.first, 0), given(item.first, 1)};
            float factors[2] = {coming[0], coming[1]};
            float sum[SUMS];
            u32 first[16], second[16];
            for (int step = 0; step < item.steps; step++) {
                const Scale scale[2] = {Scale(coming[0]), Scale(coming[1])};
                for (int i = 0; i < 2; i++) coming[i] = given(item.first + step + 1, i);
                const int slot = ring.slot;
                const u32 x_at = ring_at + slot * STAGE_BYTES;
                const char* codes = memory + slot * STAGE_BYTES + X_BYTES + (own + lane / 4) * (STEP / 2);
                barrier_wait(full + 8 * slot, ring.phase);
                const uint4 low = *reinterpret_cast<const uint4*>(codes + lane % 4 * 16);
                const uint4 high =
                    *reinterpret_cast<const uint4*>(codes + 8 * (STEP / 2) + lane % 4 * 16);
                const u64 x_tile = rows_of_128(x_at), x_more = rows_of_128(x_at + BOX_BYTES);
                decode(first, low.x, low.y, high.x, high.y, scale);
                hold(sum), hold_numbers(first);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < 4; k++)
                    multiply(sum, first + 4 * k, x_tile + 2 * k, step + k > 0);
                wgmma_commit();
                // The second half of the step before is done, so its registers may be written.
                if (step > 0) {
                    wgmma_wait<1>();
                    hold_numbers(second);
                    release(ring.slot == 0 ? STAGES - 1 : ring.slot - 1);
                }
                decode(second, low.z, low.w, high.z, high.w, scale);
                hold(sum), hold_numbers(second);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < 4; k++) multiply(sum, second + 4 * k, x_more + 2 * k, 1);
                wgmma_commit();
                wgmma_wait<1>();
                hold_numbers(first);
                ring.next();
            }
            wgmma_wait<0>();
            hold(sum);
            release(ring.slot == 0 ? STAGES - 1 : ring.slot - 1);
            for (int i = 0; i < 2; i++)
                if (ZEROS) factors[i] = __uint_as_float(__float_as_uint(factors[i]) & ~15u);
            bool last = true;
            if (item.shares > 1) {
                // A cluster has two such parts at most: the end of a tile first, the beginning of
                // another one last.
                auto part = [&](int share) {
                    const int other = cluster - item.share + share;
                    return partials + (u64(2 * other + (share == 0)) * 2 + rank) * (SUMS * THREADS);
                };
                float* mine = part(item.share) + threadIdx.x;
#pragma unroll
                for (int i = 0; i < SUMS; i++) __stcg(mine + i * THREADS, sum[i]);
                __threadfence();
                named_sync<THREADS>(1);
                if (threadIdx.x == 0) {
                    int* counter = counters + item.tile * 2 + rank;
                    arrived = atomicAdd(counter, 1);
                    if (arrived == item.shares - 1) *counter = 0;
                    __threadfence();
                }
                named_sync<THREADS>(1);
                last = arrived == item.shares - 1;
                named_sync<THREADS>(1);  // before the next tile writes there
                if (last) {
#pragma unroll
                    for (int i = 0; i < SUMS; i++) sum[i] = 0.0f;
                    for (int share = 0; share < item.shares; share++) {
                        const float* other = part(share) + threadIdx.x;
#pragma unroll
                        for (int i = 0; i < SUMS; i++) sum[i] += __ldcg(other + i * THREADS);
                    }
                }
            }
            if (last) finish(sum, item, item.row + own, sizes, factors, bias, out);
        }
    }
    // A block's memory must stay until the other has written and arrived there.
    cluster_sync();
}
