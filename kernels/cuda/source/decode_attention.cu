// Decode attention over the paged cache: one query token a row, rows of any length.
//
// The tiles of all rows' keys lie one behind the other, and each block of a KV head takes as many of
// them (Sanovar et al. 2024). A row that lies within one block's share is written directly. Of a row
// that lies in several, the last block adds up the parts that the others leave (Dao et al. 2022).
//
// A block begins with its last row, whose end another block has, and ends with its first row, of
// which others have left parts long before. Nobody stops to leave or to get a part: it needs no
// counter and no fence, since each of its words is known to be there by itself.
//
// A block has two warps, and several blocks share a processor. One warp copies queries, keys and
// values into rings, so that the memory never waits for a row's end. It begins before the kernel
// before has ended, with keys of earlier steps. Its threads copy 16 bytes at a time, since the copy
// engine is slower with pieces of the cache. The other warp multiplies: keys are the first operand of
// the scores and values that of the sums, so a product has eight columns, for up to eight query heads
// that share a KV head.
//
// The compiler is given: DIM (64, 128 or 256: the size of a head), GROUP (query heads of a KV head),
// BOX (keys that lie in one block of the cache: 16 or TILE), STAGES, WINDOW (0: none), SINKS (1 if the
// denominators have them), HALF (0: bfloat16, 1: float16), NEXT_EARLY (1 if the next kernel may
// start while keys are loading), READ_ONCE (1 if L2 gives keys and values up before other lines),
// PROJECTED (1 if rows are projections, whose queries and keys are neither normed nor rotated, and
// whose keys and values are not in the cache), WITH_NORMS.
#include "exchange.cuh"
#include "numbers.cuh"
#include "softmax.cuh"
#include "turned_heads.cuh"

constexpr int TILE = 32, QUEUE = 2;
// Pieces of 16 bytes of a key, and keys of which the threads of a warp have a piece each.
constexpr int PIECES = DIM / 8, AT_ONCE = 32 / PIECES;
constexpr int KEY_BYTES = DIM * 2, HALF_SLOT = TILE * KEY_BYTES, SLOT = 2 * HALF_SLOT;
// Boxes of a tile of keys, and tiles of which the threads of a warp know all blocks.
constexpr int BOXES = TILE / BOX, KNOWN = 32 / BOXES;
// Columns of eight query heads, steps of 16 dimensions, and bytes of a query in shared memory, apart
// from one another on its banks.
constexpr int COLUMNS = (GROUP + 7) / 8, STEPS = DIM / 16, Q_ROW = KEY_BYTES + 16;
constexpr int Q_BYTES = 8 * COLUMNS * Q_ROW;
// Behind the queries of projections lie a key, a value, cosines and sines.
constexpr int ITEM_BYTES = Q_BYTES + (PROJECTED ? 4 * KEY_BYTES : 0);

struct Sizes {
    // KV heads, keys of a block of the cache, and rows of the cache's numbers that a block has.
    int kv_heads, page, block_rows;
    // Rows of the plan, and numbers between two rows of queries, of the block tables and of results.
    int plan, q_stride, table_stride, out_stride;
    // The least tiles of a share, and whether all keys but each row's last one are of earlier steps.
    int least, early;
    // What scores are multiplied by, in units of ln 2.
    float scale;
};

// What the rows of a batch are, as in kernels/attention/decode_attention_triton.py.
struct Rows {
    const int *tables, *slots, *lengths, *ends;
};

// How projections become queries and keys.
struct Turning {
    const float *cos, *sin;
    // Weights of the norms of queries and of keys.
    const u16 *q_norm, *k_norm;
    float eps;
};

// A row, or the part of it that lies in one share.
struct Item {
    int row, length, slot;
    // Its first key, tiles, 0 behind the last item, and the first key that the query sees.
    int key, tiles, visible;
    // Shares that the row begins and ends in.
    int first_share, last_share;
};

struct Rings {
    u32 ring, q, full, empty, items_full, items_empty;
    Item* items;

    __device__ __forceinline__ Rings(char* memory, u64* barriers, Item* items) : items(items) {
        ring = shared_address(memory), q = ring + STAGES * SLOT;
        full = shared_address(barriers), empty = full + 8 * STAGES;
        items_full = empty + 8 * STAGES, items_empty = items_full + 8 * QUEUE;
    }

    __device__ __forceinline__ void init() const {
        for (int slot = 0; slot < STAGES; slot++)
            barrier_init(full + 8 * slot, 32), barrier_init(empty + 8 * slot, 1);
        for (int slot = 0; slot < QUEUE; slot++) {
            // All threads that copy queries, and the one that has written the item.
            barrier_init(items_full + 8 * slot, 33), barrier_init(items_empty + 8 * slot, 1);
        }
        barrier_init_done();
    }
};

// Returns the place of 16 bytes of a key or value.
__device__ __forceinline__ u32 place_of(int key, int piece) {
    return key * KEY_BYTES + ((piece ^ key % 8) << 4);
}

// ---- The warp that loads ----

// Returns how many of a sorted row of numbers are not above `tile`.
__device__ __forceinline__ int count_up_to(const int* ends, int count, int tile) {
    const int lane = threadIdx.x % 32, chunk = max(count / 32, 1), last = (lane + 1) * chunk - 1;
    const bool below = last < count && __ldg(ends + last) <= tile;
    const int base = __popc(__ballot_sync(~0u, below)) * chunk;
    int found = base;
    for (int i = 0; i < chunk; i += 32) {
        const int at = base + i + lane;
        const bool own = i + lane < chunk && at < count && __ldg(ends + at) <= tile;
        found += __popc(__ballot_sync(~0u, own));
    }
    return found;
}

struct Loader {
    const u16 *q, *cache;
    const Rings& rings;
    const Rows& rows;
    const Turning& turning;
    const Sizes& sizes;
    int head, share;
    // L2's policy for keys and values.
    u64 once;
    Place<STAGES> at;
    Place<QUEUE> item_at;
    // Of a row from `known` on, another one in each thread: its tiles, its slot and its length.
    int known, begin, end, slot, length;
    bool waits = true;
    // The block of one of the next boxes of keys, of another one in each thread.
    int block = 0;

    __device__ __forceinline__ void read_rows(int row) {
        known = row, row = min(row + int(threadIdx.x % 32), sizes.plan - 1);
        begin = row ? __ldg(rows.ends + row - 1) : 0, end = __ldg(rows.ends + row);
        slot = __ldg(rows.slots + row), length = __ldg(rows.lengths + row);
    }

    // Copies the key, the value and the rotation of a row's last token.
    __device__ __forceinline__ void copy_new_token(
        const Item& item, const u16* of_row, u32 target) const {
        const u16* key = of_row + (sizes.kv_heads * GROUP + head) * DIM;
        const u64 angle = u64(item.length - 1) * (DIM / 2);
        for (int i = threadIdx.x % 32; i < 4 * PIECES; i += 32) {
            const int which = i / PIECES, piece = i % PIECES;
            const void* source = key + which * (sizes.kv_heads * DIM) + piece * 8;
            if (which > 1) source = (which == 2 ? turning.cos : turning.sin) + angle + piece * 4;
            copy_16(target + i * 16, source, 16);
        }
    }

    // Tells the other warp what comes next, with its queries.
    __device__ __forceinline__ void push(const Item& item) {
        const int lane = threadIdx.x % 32;
        const u32 full = rings.items_full + 8 * item_at.slot;
        barrier_wait(rings.items_empty + 8 * item_at.slot, item_at.phase ^ 1);
        if (item.tiles) {
            const u16 *of_row = q + u64(item.row) * sizes.q_stride, *own = of_row + head * (GROUP * DIM);
            const u32 target = rings.q + item_at.slot * ITEM_BYTES;
            for (int i = lane; i < GROUP * PIECES; i += 32)
                copy_16(target + i / PIECES * Q_ROW + i % PIECES * 16, own + i * 8, 16);
            if (PROJECTED) copy_new_token(item, of_row, target + Q_BYTES);
        }
        arrive_when_copied(full);
        if (lane == 0) {
            rings.items[item_at.slot] = item;
            barrier_arrive_here(full);
        }
        item_at.next();
    }

    // Loads tiles of an item: keys, and values, which lie further behind. Those behind the last key
    // become zeros: in the cache they may be anything, and 0 x NaN would spread.
    __device__ __forceinline__ void load_tiles(
        const Item& item, const int* table, int first, int stop) {
        const int lane = threadIdx.x % 32;
        const u64 further = u64(sizes.kv_heads) * sizes.page * DIM;
        for (int i = first; i < stop; i++) {
            // The last key of projections is not in the cache.
            const int key = item.key + i * TILE, there = item.length - PROJECTED - key;
            // There may be no block behind the last key.
            if (i % KNOWN == 0)
                block = __ldg(table + min(key + lane * BOX, item.length - 1) / sizes.page);
            const u16* source[BOXES];
#pragma unroll
            for (int box = 0; box < BOXES; box++) {
                const int own = __shfl_sync(~0u, block, i % KNOWN * BOXES + box);
                const u64 row =
                    u64(own) * sizes.block_rows + head * sizes.page + (key + box * BOX) % sizes.page;
                source[box] = cache + row * DIM + lane * 8;
            }
            const u32 target = rings.ring + at.slot * SLOT;
            barrier_wait(rings.empty + 8 * at.slot, at.phase ^ 1);
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int j = 0; j < TILE / AT_ONCE; j++) {
                    const int box = j * AT_ONCE / BOX, own = j * AT_ONCE + lane / PIECES;
                    const u32 to = target + half * HALF_SLOT + place_of(own, lane % PIECES);
                    const u16* from =
                        source[box] + (j * AT_ONCE - box * BOX) * DIM + half * further;
                    if (READ_ONCE) copy_16_by(to, from, own < there ? 16 : 0, once);
                    else copy_16(to, from, own < there ? 16 : 0);
                }
            arrive_when_copied(rings.full + 8 * at.slot);
            at.next();
        }
    }

    // Loads a row, as far as its tiles are some of those from `start` up to `stop`.
    __device__ __forceinline__ void load_row(int row, int start, int stop, int each) {
        if (row < known || row >= known + 32) read_rows(row);
        const int first = __shfl_sync(~0u, begin, row - known);
        const int last = __shfl_sync(~0u, end, row - known), tile = max(first, start);
        const int own = __shfl_sync(~0u, slot, row - known);
        const int* table = rows.tables + u64(own) * sizes.table_stride;
        Item item;
        item.row = row, item.length = __shfl_sync(~0u, length, row - known), item.slot = own;
        item.visible = WINDOW ? max(item.length - WINDOW, 0) : 0;
        item.key = (tile - first + item.visible / TILE) * TILE;
        item.tiles = min(last, stop) - tile;
        item.first_share = first / each, item.last_share = (last - 1) / each;
        int early = 0;
        if (waits) {
            // All keys but the row's last one may be of earlier steps.
            if (sizes.early)
                early = min(min(STAGES, item.tiles), max(item.length - 1 - item.key, 0) / TILE);
            load_tiles(item, table, 0, early);
            wait_for_kernels_before();
            if (NEXT_EARLY) let_next_kernel_start();
            waits = false;
        }
        push(item);
        load_tiles(item, table, early, item.tiles);
    }

    // Loads all rows of this block's share: `each` tiles of those of all rows.
    __device__ __forceinline__ void load_share(int tiles, int each) {
        const int start = share * each, stop = min(start + each, tiles);
        if (start < stop) {
            const int first = count_up_to(rows.ends, sizes.plan, start);
            const int last = count_up_to(rows.ends, sizes.plan, stop - 1);
            read_rows(first);
            for (int i = 0; i <= last - first; i++)
                load_row(i == 0 ? last : i < last - first ? first + i : first, start, stop, each);
        } else {
            // A block without a share waits too, so that no later kernel overtakes the one before.
            wait_for_kernels_before();
        }
        push(Item{});
    }
};

// ---- The warp that multiplies ----

__device__ __forceinline__ void load_matrices(u32 (&words)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void load_transposed(u32 (&words)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
}

// sum += x w, of 16 x 16 and 16 x 8 numbers.
__device__ __forceinline__ void multiply(
    float (&sum)[4], const u32 (&x)[4], const u32 (&w)[2]) {
#if HALF
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3},"
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3},"
#endif
                 " {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(w[0]), "r"(w[1]));
}

// ---- Parts of rows, left to other blocks ----

// Bytes of a part: words of 16 bytes of each thread, and four for the softmax.
constexpr int PART = (STEPS * 32 + 4) * 16;
// Whether there are registers for a part beside what a thread multiplies.
constexpr bool PART_EARLY = COLUMNS * STEPS <= 8;

// Returns a thread's place in a part, and that of the softmax behind all threads' sums.
__device__ __forceinline__ int place_in_part(int m) { return (m * 32 + threadIdx.x % 32) * 16; }
__device__ __forceinline__ int place_of_stats() { return (STEPS * 32 + threadIdx.x % 4) * 16; }

// Returns the bits of a number, which another NaN stands for if they are NOT_THERE.
__device__ __forceinline__ u32 left(float value) { return min(__float_as_uint(value), NOT_THERE - 1); }

__device__ __forceinline__ void leave_words(char* place, float a, float b, float c, float d) {
    give_words(place, make_uint4(left(a), left(b), left(c), left(d)));
}

// What a thread has of a part.
struct Part {
    uint4 sums[STEPS], stats;

    __device__ __forceinline__ void read(const char* part) {
        stats = words_now(part + place_of_stats());
#pragma unroll
        for (int m = 0; m < STEPS; m++) sums[m] = words_now(part + place_in_part(m));
    }

    __device__ __forceinline__ bool is_there() const {
        bool all = are_there(stats);
#pragma unroll
        for (int m = 0; m < STEPS; m++) all = all && are_there(sums[m]);
        return __all_sync(~0u, all);
    }
};

// Leaves the place of a part as the next launch must find it.
__device__ __forceinline__ void clear_part(char* part) {
    const uint4 none = make_uint4(NOT_THERE, NOT_THERE, NOT_THERE, NOT_THERE);
#pragma unroll
    for (int m = 0; m < STEPS; m++) give_words(part + place_in_part(m), none);
    if (threadIdx.x % 32 < 4) give_words(part + place_of_stats(), none);
}

// ---- The softmax ----

// The softmax of a row's eight query heads, and the sums of values. A thread has two heads, 2 quad and
// the next one: their highest scores in units of ln 2, its part of their masses, and sums of the
// dimensions 16 m + lane / 4 at 4 m, and of those 8 further at 4 m + 2.
struct Heads {
    u32 query[STEPS][2];
    float top[2], mass[2], sum[STEPS][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < 2; i++) top[i] = nothing(), mass[i] = 0.0f;
#pragma unroll
        for (int m = 0; m < STEPS; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) sum[m][i] = 0.0f;
    }

    __device__ __forceinline__ void begin(u32 queries) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int k = 0; k < STEPS; k += 2) {
            u32 words[4];
            load_matrices(words, queries + lane % 8 * Q_ROW + (2 * k + lane / 8) * 16);
            query[k][0] = words[0], query[k][1] = words[1];
            query[k + 1][0] = words[2], query[k + 1][1] = words[3];
        }
        clear();
    }

    // Makes weights of a tile's scores, as operands of the sums' two products. first: the tile's
    // first key; keys from `length` on, and those before `visible`, are not seen.
    __device__ __forceinline__ void weigh(
        float (&s)[2][4], u32 (&weights)[2][2], int first, int visible, int length, float scale) {
        const int key = first + threadIdx.x % 32 / 4;
        if (first + TILE > length || (WINDOW && first < visible)) {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int own = key + i / 4 * 16 + i % 4 / 2 * 8;
                if (own >= length || (WINDOW && own < visible)) s[i / 4][i % 4] = nothing();
            }
        }
        float fade[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float highest = fmaxf(fmaxf(s[0][i], s[0][i + 2]), fmaxf(s[1][i], s[1][i + 2]));
#pragma unroll
            for (int apart = 4; apart < 32; apart *= 2)
                highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, apart));
            highest = fmaxf(top[i], highest * scale);
            fade[i] = power_of_2(top[i] - highest);
            top[i] = highest, mass[i] *= fade[i];
        }
#pragma unroll
        for (int block = 0; block < 2; block++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float* own = s[block] + 2 * half;
#pragma unroll
                for (int i = 0; i < 2; i++)
                    own[i] = power_of_2(fmaf(own[i], scale, -top[i])), mass[i] += own[i];
                weights[block][half] = transposed(packed(own[0], own[1]));
            }
#pragma unroll
        for (int m = 0; m < STEPS; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) sum[m][i] *= fade[i % 2];
    }

    __device__ __forceinline__ void add_masses_up() {
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int apart = 4; apart < 32; apart *= 2)
                mass[i] += __shfl_xor_sync(~0u, mass[i], apart);
    }

    // Leaves a part of a row to the block that has the row's end.
    __device__ __forceinline__ void leave(char* part) const {
#pragma unroll
        for (int m = 0; m < STEPS; m++)
            leave_words(part + place_in_part(m), sum[m][0], sum[m][1], sum[m][2], sum[m][3]);
        if (threadIdx.x % 32 < 4)
            leave_words(part + place_of_stats(), top[0], top[1], mass[0], mass[1]);
    }

    // Adds a part that another block has left.
    __device__ __forceinline__ void add(const Part& part) {
        const float tops[2] = {__uint_as_float(part.stats.x), __uint_as_float(part.stats.y)};
        const float masses[2] = {__uint_as_float(part.stats.z), __uint_as_float(part.stats.w)};
        float fade[2], share[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float highest = fmaxf(top[i], tops[i]);
            fade[i] = power_of_2(top[i] - highest), share[i] = power_of_2(tops[i] - highest);
            top[i] = highest, mass[i] = mass[i] * fade[i] + masses[i] * share[i];
        }
#pragma unroll
        for (int m = 0; m < STEPS; m++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                sum[m][i] = sum[m][i] * fade[i % 2] +
                            __uint_as_float(word_of(part.sums[m], i)) * share[i % 2];
    }

    // Writes the results of the heads from `first` on. out: of the row and KV head.
    __device__ __forceinline__ void write(u16* out, int first, const float* sinks) {
        const int lane = threadIdx.x % 32, quad = lane % 4, own = first + lane / 4;
        float share[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (SINKS)
                mass[i] += power_of_2(
                    __ldg(sinks + min(first + 2 * quad + i, GROUP - 1)) * LOG2_E - top[i]);
            share[i] = 1.0f / mass[i];
        }
#pragma unroll
        for (int m = 0; m < STEPS; m++) {
            const u32 low = packed(sum[m][0] * share[0], sum[m][1] * share[1]);
            const u32 high = packed(sum[m][2] * share[0], sum[m][3] * share[1]);
            const uint2 four = four_columns(transposed(low), transposed(high));
            if (own < GROUP)
                *reinterpret_cast<uint2*>(
                    out + own * DIM + 16 * m + 8 * (quad / 2) + 4 * (quad & 1)) = four;
        }
    }
};

// ---- Projections ----

// The key and the value of a row's last token.
struct NewToken {
    Head key, value;
    // Where the key goes. The value lies further behind.
    u16* target;

    // Writes them into the tile that ends the row.
    __device__ __forceinline__ void write_to(u32 keys, int at) const {
        if (threadIdx.x % 32 >= HEAD_THREADS) return;
#pragma unroll
        for (int i = 0; i < HEAD_WORDS; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int byte = half * DIM + Head::byte(i);
                const u32 place = keys + place_of(at, byte / 16) + byte % 16;
                write_word(place, half ? key.high[i] : key.low[i]);
                write_word(place + HALF_SLOT, half ? value.high[i] : value.low[i]);
            }
    }

    // Writes them into the cache.
    __device__ __forceinline__ void keep(const Sizes& sizes) const {
        if (threadIdx.x % 32 >= HEAD_THREADS) return;
        key.write(target), value.write(target + u64(sizes.kv_heads) * sizes.page * DIM);
    }
};

// Norms and rotates heads.
struct Turner {
    Head q_norm, k_norm;
    float eps;

    __device__ __forceinline__ explicit Turner(const Turning& given) : eps(given.eps) {
        if (WITH_NORMS) q_norm.read(given.q_norm), k_norm.read(given.k_norm);
    }

    __device__ __forceinline__ void turn(Head& head, const Head& weights, const Angles& angles) const {
        if (WITH_NORMS) head.norm(weights, eps);
        angles.turn(head);
    }

    // Turns the queries of an item, where they are.
    __device__ __forceinline__ void turn_queries(u32 queries, const Angles& angles) const {
        const int first = threadIdx.x % 32 / HEAD_THREADS;
#pragma unroll 2
        for (int i = 0; i < GROUP; i += HEADS_AT_ONCE) {
            // Threads beyond the last head turn that one too, and write nothing.
            const u32 place = queries + min(i + first, GROUP - 1) * Q_ROW;
            Head head;
            head.read(place);
            turn(head, q_norm, angles);
            if (i + first < GROUP) head.write(place);
        }
        __syncwarp();
    }

    // Returns what projections are of the row's last token.
    __device__ __forceinline__ NewToken new_token(u32 beside, const Angles& angles) const {
        NewToken found;
        found.key.read(beside), found.value.read(beside + KEY_BYTES);
        turn(found.key, k_norm, angles);
        return found;
    }
};

// Attends to the tiles of an item. last: the token that ends the row; taken unless it is in the cache.
__device__ __forceinline__ void attend(
    Heads (&heads)[COLUMNS], const Item& item, const Rings& rings, Place<STAGES>& at, float scale,
    const NewToken& last, bool taken) {
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < item.tiles; i++) {
        const int key = item.key + i * TILE;
        const u32 keys = rings.ring + at.slot * SLOT, values = keys + HALF_SLOT;
        barrier_wait(rings.full + 8 * at.slot, at.phase);
        if (taken && i == item.tiles - 1) {
            last.write_to(keys, item.length - 1 - key);
            __syncwarp();
        }
        float s[COLUMNS][2][4] = {};
#pragma unroll
        for (int k = 0; k < STEPS; k++)
#pragma unroll
            for (int block = 0; block < 2; block++) {
                u32 x[4];
                load_matrices(x, keys + place_of(block * 16 + lane % 16, 2 * k + lane / 16));
#pragma unroll
                for (int c = 0; c < COLUMNS; c++) multiply(s[c][block], x, heads[c].query[k]);
            }
        u32 weights[COLUMNS][2][2];
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
            heads[c].weigh(s[c], weights[c], key, item.visible, item.length, scale);
#pragma unroll
        for (int m = 0; m < STEPS; m++)
#pragma unroll
            for (int block = 0; block < 2; block++) {
                u32 x[4];
                const int key = block * 16 + lane / 16 * 8 + lane % 8;
                load_transposed(x, values + place_of(key, 2 * m + lane / 8 % 2));
#pragma unroll
                for (int c = 0; c < COLUMNS; c++) multiply(heads[c].sum[m], x, weights[c][block]);
            }
        __syncwarp();
        if (lane == 0) barrier_arrive_here(rings.empty + 8 * at.slot);
        at.next();
    }
}

extern "C" __global__ void __launch_bounds__(64, DIM > 128 ? 2 : 4) decode_attention(
    const u16* q, u16* cache, const __grid_constant__ Rows rows,
    const __grid_constant__ Turning turning, const float* __restrict__ sinks, char* parts, u16* out,
    const __grid_constant__ Sizes sizes) {
    extern __shared__ __align__(1024) char memory[];
    __shared__ __align__(8) u64 barriers[2 * (STAGES + QUEUE)];
    __shared__ Item items[QUEUE];
    const Rings rings(memory, barriers, items);
    const int head = blockIdx.x % sizes.kv_heads, share = blockIdx.x / sizes.kv_heads;
    if (threadIdx.x == 0) rings.init();
    __syncthreads();
    if (threadIdx.x >= 32) {
        // A step's tables are complete before the kernel before this one (see kernels/launch.py).
        const int tiles = __ldg(rows.ends + sizes.plan - 1), shares = gridDim.x / sizes.kv_heads;
        Loader loader{q, cache, rings, rows, turning, sizes, head, share, read_once()};
        loader.load_share(tiles, max((tiles + shares - 1) / shares, sizes.least));
        return;
    }
    const Turner turner(turning);
    wait_for_kernels_before();
    // The part that a share leaves: at most one.
    auto part_of = [&](int share) {
        return parts + u64((share * sizes.kv_heads + head) * COLUMNS) * PART;
    };
    Place<STAGES> at;
    for (Place<QUEUE> item_at;; item_at.next()) {
        barrier_wait(rings.items_full + 8 * item_at.slot, item_at.phase);
        const Item item = items[item_at.slot];
        if (item.tiles == 0) return;
        const bool ends_here = item.last_share == share;
        const u32 queries = rings.q + item_at.slot * ITEM_BYTES;
        NewToken last;
        if (PROJECTED) {
            const u32 beside = queries + Q_BYTES;
            const Angles angles(beside + 2 * KEY_BYTES, beside + 3 * KEY_BYTES);
            turner.turn_queries(queries, angles);
            if (ends_here) {
                last = turner.new_token(beside, angles);
                const int key = item.length - 1;
                const int* table = rows.tables + u64(item.slot) * sizes.table_stride;
                const u64 row = u64(__ldg(table + key / sizes.page)) * sizes.block_rows +
                                head * sizes.page + key % sizes.page;
                last.target = cache + row * DIM;
            }
        }
        Heads heads[COLUMNS];
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) heads[c].begin(queries + c * 8 * Q_ROW);
        __syncwarp();
        if (threadIdx.x == 0) barrier_arrive_here(rings.items_empty + 8 * item_at.slot);
        // The first part is mostly there by now. If it is not, it is read again.
        Part part;
        if (PART_EARLY && ends_here && item.first_share < share)
            part.read(part_of(item.first_share));
        attend(heads, item, rings, at, sizes.scale, last, PROJECTED && ends_here);
        if (PROJECTED && ends_here) last.keep(sizes);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            heads[c].add_masses_up();
            if (!ends_here) heads[c].leave(part_of(share) + c * PART);
        }
        if (!ends_here) continue;
        u16* target = out + u64(item.row) * sizes.out_stride + head * (GROUP * DIM);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            for (int other = item.first_share; other < share; other++) {
                char* place = part_of(other) + c * PART;
                if (!PART_EARLY || c > 0 || other > item.first_share) part.read(place);
                // Blocks start in their order, so the other one is there, or has ended.
                while (!part.is_there()) part.read(place);
                clear_part(place);
                heads[c].add(part);
            }
            heads[c].write(target, 8 * c, sinks + head * GROUP);
        }
    }
}
