// Attention of prompt chunks over the paged cache: FlashAttention-3 (Shah et al. 2024).
//
// A block takes tile after tile of ROWS rows: several tokens, and for each the query heads that share
// a KV head. Tiles are taken from a counter, the last ones first, which see most keys. So no
// processor has more to do than another, and the beginning of a tile lies beside the end of the one
// before.
//
// One warp loads queries, keys and values by the copy engine into rings. Two warpgroups multiply 64
// rows each. A warpgroup begins the scores of the next keys before it needs the values of these, so
// that the tensor cores work while it computes weights.
//
// The compiler is given: DIM (64 or 128: the size of a head), GROUP (query heads of a KV head), BOX
// (keys that lie in one block: at most KEYS), Q_STAGES, KV_STAGES, WINDOW (0: none), SINKS (1 if the
// softmax begins with them), HALF (0: bfloat16, 1: float16).
#include "numbers.cuh"
#include "scores.cuh"
#include "softmax.cuh"
#include "values.cuh"

constexpr int ROWS = 128, KEYS = 64, TOKENS = ROWS / GROUP;
// The copy engine's pattern has 64 numbers in a row.
constexpr int PIECES = DIM / 64, ROW_BYTES = 128;
constexpr int Q_PIECE = ROWS * ROW_BYTES, KV_PIECE = KEYS * ROW_BYTES;
constexpr int Q_BYTES = PIECES * Q_PIECE, KV_BYTES = PIECES * KV_PIECE;
// Boxes of a tile of keys, and tiles of which the threads of a warp know all blocks.
constexpr int BOXES = KEYS / BOX, KNOWN = 32 / BOXES;
constexpr int SCORES = KEYS / 2, SUMS = DIM / 2, WORDS = SCORES / 2;
// Registers of a thread that loads, and of one that multiplies.
constexpr int LOADING = 56, MULTIPLYING = 224;

struct Sizes {
    // KV heads, keys of a block of the cache, and rows of the cache's numbers that a block has.
    int kv_heads, page, block_rows;
    // Rows of the plan, and numbers between two rows of the block tables and of the result.
    int plan, table_stride, out_stride;
    // What scores are multiplied by, in units of ln 2.
    float scale;
};

// What the rows of a batch are, as in kernels/attention/prefill_attention_triton.py.
struct Rows {
    const int *tables, *slots, *lengths, *starts, *ends;
};

// A tile of queries of a KV head.
struct Tile {
    // The first token's place among all queries, and its position; valid tokens, 0 behind the end.
    int head, query, position, tokens;
    // The keys that the tile sees: from the first one's tile of keys on.
    int begin, end;
};

// The rings of a block, and their barriers.
struct Rings {
    u32 q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty, whole;

    __device__ __forceinline__ Rings(char* memory, u64* barriers) {
        q = shared_address(memory), k = q + Q_STAGES * Q_BYTES, v = k + KV_STAGES * KV_BYTES;
        q_full = shared_address(barriers), q_empty = q_full + 8 * Q_STAGES;
        k_full = q_empty + 8 * Q_STAGES, k_empty = k_full + 8 * KV_STAGES;
        v_full = k_empty + 8 * KV_STAGES, v_empty = v_full + 8 * KV_STAGES;
        whole = v_empty + 8 * KV_STAGES;
    }

    __device__ __forceinline__ void init() const {
        // Full by the thread that loads; empty by the warps that multiply.
        for (int slot = 0; slot < Q_STAGES; slot++)
            barrier_init(q_full + 8 * slot, 1), barrier_init(q_empty + 8 * slot, 8);
        for (int slot = 0; slot < KV_STAGES; slot++) {
            barrier_init(k_full + 8 * slot, 1), barrier_init(k_empty + 8 * slot, 8);
            barrier_init(v_full + 8 * slot, 1), barrier_init(v_empty + 8 * slot, 8);
        }
        barrier_init(whole, 1);
        barrier_init_done();
    }
};

// Tells the warp that loads that this warp is done with what the barrier stands for.
__device__ __forceinline__ void release(u32 barrier) {
    if (threadIdx.x % 32 == 0) barrier_arrive_here(barrier);
}

// ---- The warp that loads ----

// A tile, and what is needed to load its keys: all threads of the warp have it.
struct Found {
    Tile tile;
    const int* table;
    // Tokens of the row.
    int length;
    // The block of one of the next boxes of keys, of another one in each thread.
    int block;

    // Reads the blocks of the boxes from `key` on.
    __device__ __forceinline__ void read_blocks(int key, int page) {
        block = __ldg(table + min(key + int(threadIdx.x % 32) * BOX, tile.end - 1) / page);
    }
};

// Loads the keys of a tile, or its values, which lie `further` rows behind them.
__device__ __forceinline__ void load_keys(
    const TileMap* map, u32 target, u32 barrier, const int (&rows)[BOXES], int further) {
#pragma unroll
    for (int box = 0; box < BOXES; box++)
#pragma unroll
        for (int piece = 0; piece < PIECES; piece++)
            load_tile<false>(
                map, target + piece * KV_PIECE + box * BOX * ROW_BYTES, barrier, piece * 64,
                rows[box] + further, 0);
}

// Returns the number of tiles of all KV heads.
__device__ __forceinline__ int count(const Rows& rows, const Sizes& sizes) {
    return __ldg(rows.ends + sizes.plan - 1) * sizes.kv_heads;
}

// Returns the tile of a number. The last ones of a head come first.
__device__ __forceinline__ Found find(int number, const Rows& rows, const Sizes& sizes) {
    Found found = {};
    Tile& tile = found.tile;
    const int index = __ldg(rows.ends + sizes.plan - 1) - 1 - number / sizes.kv_heads;
    if (index < 0) return found;
    int row = 0, before = 0;
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < sizes.plan; i += 32) {
        const int end = __ldg(rows.ends + i);
        if (end <= index) row++, before = max(before, end);
    }
    row = __reduce_add_sync(~0u, row), before = __reduce_max_sync(~0u, before);
    const int start = __ldg(rows.starts + row), tokens = __ldg(rows.starts + row + 1) - start;
    const int first = (index - before) * TOKENS;
    found.length = __ldg(rows.lengths + row);
    found.table = rows.tables + u64(__ldg(rows.slots + row)) * sizes.table_stride;
    tile.head = number % sizes.kv_heads;
    tile.query = start + first, tile.position = found.length - tokens + first;
    tile.tokens = min(TOKENS, tokens - first);
    tile.end = tile.position + tile.tokens;
    if (WINDOW) tile.begin = max(tile.position - WINDOW + 1, 0) / KEYS * KEYS;
    found.read_blocks(tile.begin, sizes.page);
    return found;
}

// Loads tiles until there are none. Each block begins with the tile of its own number. `taken` counts
// the others, of all blocks.
__device__ __forceinline__ void load(
    const TileMap* q_map, const TileMap* kv_map, const Rings& rings, Tile* tiles, const Rows& rows,
    int* taken, const Sizes& sizes) {
    const int lane = threadIdx.x % 32;
    Place<Q_STAGES> q_at;
    Place<KV_STAGES> at;
    u32 whole_phase = 0;
    // A step's tables are complete before the kernel before this one (see kernels/launch.py).
    Found found = find(blockIdx.x, rows, sizes);
    wait_for_kernels_before();
    while (found.tile.tokens > 0) {
        const Tile tile = found.tile;
        const u32 q_full = rings.q_full + 8 * q_at.slot;
        int next = 0;
        if (lane == 0) {
            next = atomicAdd(taken, 1);
            barrier_wait(rings.q_empty + 8 * q_at.slot, q_at.phase ^ 1);
            tiles[q_at.slot] = tile;
            barrier_expect(q_full, TOKENS * GROUP * ROW_BYTES * PIECES);
#pragma unroll
            for (int piece = 0; piece < PIECES; piece++)
                load_box(
                    q_map, rings.q + q_at.slot * Q_BYTES + piece * Q_PIECE, q_full, piece * 64,
                    tile.head * GROUP, tile.query);
        }
        q_at.next();
        for (int key = tile.begin, step = 0; key < tile.end; key += KEYS, step++) {
            if (step == KNOWN) step = 0, found.read_blocks(key, sizes.page);
            int first_rows[BOXES];
#pragma unroll
            for (int box = 0; box < BOXES; box++)
                first_rows[box] =
                    __shfl_sync(~0u, found.block, step * BOXES + box) * sizes.block_rows +
                    tile.head * sizes.page + (key + box * BOX) % sizes.page;
            const u32 k_full = rings.k_full + 8 * at.slot, v_full = rings.v_full + 8 * at.slot;
            const u32 values = rings.v + at.slot * KV_BYTES;
            const int there = found.length - key;
            if (lane == 0) {
                barrier_wait(rings.k_empty + 8 * at.slot, at.phase ^ 1);
                barrier_expect(k_full, KV_BYTES);
                load_keys(kv_map, rings.k + at.slot * KV_BYTES, k_full, first_rows, 0);
                barrier_wait(rings.v_empty + 8 * at.slot, at.phase ^ 1);
                const u32 barrier = there < KEYS ? rings.whole : v_full;
                barrier_expect(barrier, KV_BYTES);
                load_keys(kv_map, values, barrier, first_rows, sizes.kv_heads * sizes.page);
            }
            if (there < KEYS) {
                // Values behind the last token may be anything, and 0 x NaN would spread.
                barrier_wait(rings.whole, whole_phase);
                whole_phase ^= 1;
                for (int i = lane; i < (KEYS - there) * 8 * PIECES; i += 32) {
                    const int piece = i % PIECES, place = there * ROW_BYTES + i / PIECES * 16;
                    zero_16(values + piece * KV_PIECE + place);
                }
                shared_memory_fence();
                __syncwarp();
                if (lane == 0) barrier_arrive_here(v_full);
            }
            at.next();
        }
        next = __shfl_sync(~0u, next, 0);
        // Each block with a tile asks in vain once, so there are as many questions as tiles. The last
        // one sets the counter back for the next launch.
        if (lane == 0 && next == count(rows, sizes) - 1) *taken = 0;
        found = find(gridDim.x + next, rows, sizes);
    }
    if (lane == 0) {
        barrier_wait(rings.q_empty + 8 * q_at.slot, q_at.phase ^ 1);
        tiles[q_at.slot] = found.tile;
        barrier_arrive_here(rings.q_full + 8 * q_at.slot);
    }
}

// ---- The warpgroups that multiply ----

// The softmax of a thread's two rows: its highest score, in units of ln 2, and this thread's part of
// the weights' sum.
struct Softmax {
    float top[2], mass[2];

    // Makes weights of scores. fade: what earlier sums are multiplied by. masked: whether not all of
    // these keys are seen; positions: of the rows.
    __device__ __forceinline__ void add(
        float (&s)[SCORES], float (&fade)[2], bool masked, int key, const int (&positions)[2],
        float scale) {
        if (masked) {
            const int column = key + 2 * (threadIdx.x % 4);
#pragma unroll
            for (int i = 0; i < SCORES; i++) {
                const int own = column + 8 * (i / 4) + i % 2, position = positions[i / 2 % 2];
                if (own > position || (WINDOW && own <= position - WINDOW)) s[i] = nothing();
            }
        }
        float base[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float highest = s[2 * half];
#pragma unroll
            for (int i = 0; i < SCORES; i += 4)
                highest = fmaxf(highest, fmaxf(s[i + 2 * half], s[i + 2 * half + 1]));
            highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
            highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
            highest = fmaxf(top[half], highest * scale);
            // A row of a window may have seen nothing yet.
            base[half] = WINDOW && highest == nothing() ? 0.0f : highest;
            fade[half] = power_of_2(top[half] - base[half]);
            top[half] = highest, mass[half] *= fade[half];
        }
#pragma unroll
        for (int i = 0; i < SCORES; i += 2) {
            const int half = i / 2 % 2;
            s[i] = power_of_2(fmaf(s[i], scale, -base[half]));
            s[i + 1] = power_of_2(fmaf(s[i + 1], scale, -base[half]));
            mass[half] += s[i] + s[i + 1];
        }
    }
};

// Returns weights as the first operand of a product with values. It comes when no product is on its
// way: else the compiler lets products wait for one another.
__device__ __forceinline__ void pack(const float (&s)[SCORES], u32 (&weights)[WORDS]) {
#pragma unroll
    for (int i = 0; i < WORDS; i++) weights[i] = packed(s[2 * i], s[2 * i + 1]);
    hold(weights);
}

// The order of the two warpgroups: each begins its products in turn, and computes weights while the
// tensor cores have the other's.
struct Turn {
    const int own;

    __device__ __forceinline__ explicit Turn(int warpgroup) : own(warpgroup) {
        if (own == 1) pass();
    }

    __device__ __forceinline__ void wait() const { named_sync<256>(1 + own); }

    __device__ __forceinline__ void pass() const { named_arrive<256>(2 - own); }
};

// Begins the scores of 64 rows of queries and the keys in a slot.
__device__ __forceinline__ void begin_scores(float (&s)[SCORES], u32 queries, u32 keys) {
    hold(s);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < DIM / 16; k++)
        multiply(
            s, rows_of_128(queries + k / 4 * Q_PIECE) + k % 4 * 2,
            rows_of_128(keys + k / 4 * KV_PIECE) + k % 4 * 2, k > 0);
    wgmma_commit();
    hold(s);
}

// Begins sum += weights x values of a slot, or begins the sum.
__device__ __forceinline__ void begin_sums(
    float (&sum)[SUMS], const u32 (&weights)[WORDS], u32 values, bool more) {
    hold(sum);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++)
        multiply(
            sum, weights + 4 * k, columns_of_128(values + k * 16 * ROW_BYTES, KV_PIECE),
            more || k > 0);
    wgmma_commit();
    hold(sum);
}

// Computes the results of a tile's rows that belong to this thread, not yet divided by the mass.
__device__ __forceinline__ void attend(
    float (&sum)[SUMS], Softmax& softmax, const Turn& turn, const Tile& tile, const Rings& rings,
    u32 queries, u32 q_empty, Place<KV_STAGES>& at, const int (&positions)[2], float scale) {
    float s[SCORES], fade[2];
    u32 weights[WORDS];
    // Tiles of keys that all rows see whole lie between these.
    const int all_see = (tile.position + 1) / KEYS * KEYS;
    const int edge = WINDOW ? max(tile.end - WINDOW, 0) : 0;
    auto masked = [&](int key) { return key >= all_see || key < edge; };
    Place<KV_STAGES> before = at;
    barrier_wait(rings.k_full + 8 * at.slot, at.phase);
    begin_scores(s, queries, rings.k + at.slot * KV_BYTES);
    wgmma_wait<0>();
    hold(s);
    release(rings.k_empty + 8 * at.slot);
    softmax.add(s, fade, masked(tile.begin), tile.begin, positions, scale);
    pack(s, weights);
    at.next();
    for (int key = tile.begin + KEYS; key < tile.end; key += KEYS) {
        barrier_wait(rings.k_full + 8 * at.slot, at.phase);
        turn.wait();
        begin_scores(s, queries, rings.k + at.slot * KV_BYTES);
        barrier_wait(rings.v_full + 8 * before.slot, before.phase);
        begin_sums(sum, weights, rings.v + before.slot * KV_BYTES, key > tile.begin + KEYS);
        turn.pass();
        wgmma_wait<1>();
        hold(s);
        release(rings.k_empty + 8 * at.slot);
        softmax.add(s, fade, masked(key), key, positions, scale);
        wgmma_wait<0>();
        hold(sum);
        release(rings.v_empty + 8 * before.slot);
#pragma unroll
        for (int i = 0; i < SUMS; i++) sum[i] *= fade[i / 2 % 2];
        pack(s, weights);
        before = at;
        at.next();
    }
    release(q_empty);
    barrier_wait(rings.v_full + 8 * before.slot, before.phase);
    begin_sums(sum, weights, rings.v + before.slot * KV_BYTES, tile.end > tile.begin + KEYS);
    wgmma_wait<0>();
    hold(sum);
    release(rings.v_empty + 8 * before.slot);
}

// Writes the results of a thread's rows, in 16 bits.
__device__ __forceinline__ void write(
    const float (&sum)[SUMS], const Softmax& softmax, const Tile& tile, int first_row, u16* out,
    const Sizes& sizes) {
    const int quad = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float mass = softmax.mass[half];
        mass += __shfl_xor_sync(~0u, mass, 1);
        mass += __shfl_xor_sync(~0u, mass, 2);
        const float share = 1.0f / mass;
        const int row = first_row + 8 * half, token = row / GROUP;
        u16* target = out + u64(tile.query + token) * sizes.out_stride +
            (tile.head * GROUP + row % GROUP) * DIM;
#pragma unroll
        for (int j = 0; j < DIM / 8; j += 2) {
            const int at = 4 * j + 2 * half;
            const uint2 four = four_columns(
                packed(sum[at] * share, sum[at + 1] * share),
                packed(sum[at + 4] * share, sum[at + 5] * share));
            if (token < tile.tokens)
                *reinterpret_cast<uint2*>(target + 8 * (j + quad / 2) + 4 * (quad & 1)) = four;
        }
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) prefill_attention(
    const __grid_constant__ TileMap q_map, const __grid_constant__ TileMap kv_map,
    const __grid_constant__ Rows rows, const float* __restrict__ sinks, int* taken, u16* out,
    const __grid_constant__ Sizes sizes) {
    extern __shared__ __align__(1024) char memory[];
    __shared__ __align__(8) u64 barriers[2 * Q_STAGES + 4 * KV_STAGES + 1];
    __shared__ Tile tiles[Q_STAGES];
    const Rings rings(memory, barriers);
    const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) rings.init();
    __syncthreads();
    if (warpgroup == 2) {
        fewer_registers<LOADING>();
        if (warp == 0) load(&q_map, &kv_map, rings, tiles, rows, taken, sizes);
        return;
    }
    more_registers<MULTIPLYING>();
    wait_for_kernels_before();
    let_next_kernel_start();
    const Turn turn(warpgroup);
    const int own = warpgroup * 64, row = own + warp * 16 + lane / 4;
    Place<Q_STAGES> q_at;
    Place<KV_STAGES> at;
    for (;;) {
        barrier_wait(rings.q_full + 8 * q_at.slot, q_at.phase);
        const Tile tile = tiles[q_at.slot];
        if (tile.tokens == 0) return;
        Softmax softmax;
        int positions[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int at_row = row + 8 * half;
            positions[half] = tile.position + at_row / GROUP;
            softmax.top[half] = nothing(), softmax.mass[half] = 0.0f;
            if (SINKS) {
                softmax.top[half] = __ldg(sinks + tile.head * GROUP + at_row % GROUP) * LOG2_E;
                // A quad's threads add their masses up.
                softmax.mass[half] = lane % 4 == 0 ? 1.0f : 0.0f;
            }
        }
        float sum[SUMS];
        attend(
            sum, softmax, turn, tile, rings, rings.q + q_at.slot * Q_BYTES + own * ROW_BYTES,
            rings.q_empty + 8 * q_at.slot, at, positions, sizes.scale);
        write(sum, softmax, tile, row, out, sizes);
        q_at.next();
    }
}
