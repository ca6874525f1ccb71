// Both products of coded experts for one row, where reading the experts' matrices takes the time.
//
// All blocks run at once. A block's share of gate and up, and then that of down, stream by through
// one ring of shared memory. What is read of down does not depend on what is computed here, so the
// memory does not rest between the products. Only the inner values have to be complete before down
// is multiplied: each block waits for those of all blocks, and copies them from memory.
//
// An item of gate and up is eight inner values. A team of warps shares out its steps of 128
// columns, and teams take turns. An item of down is eight results, and all warps share out its
// pairs of experts and their steps. Codes are decoded in registers as the first operand of the
// tensor cores. Its first eight rows are of a gate, or of an expert, and the others of up, or of
// the next expert: the columns of the second operand are the inputs of both in turn. The sums of a
// step take the place of its codes, until one warp adds those of all steps.
//
// A thread that reads memory while codes are loading waits behind all of them. So scales and biases
// come with the codes that they belong to, and the rest is read before.
//
// Numbers are added in the order of kernels/experts/coded_few_gluon.py, so a row has the same bits
// in a step of several rows.
//
// The compiler is given: what the included files say, and WIDTH and INNER (numbers of a row and of
// inner values), GATE_GROUP and DOWN_GROUP (columns that share a scale, or 0 for all), GATE_HEIGHT
// and DOWN_HEIGHT (rows that share one), SHARES (of an expert's columns of down, each of which is
// added by itself), STAGES, WARPS (that multiply), GATE_AT_ONCE and DOWN_AT_ONCE (steps of a warp),
// HELD (steps that a warp decodes while it waits for the other blocks), MOST_ITEMS (of down, of a
// block), GATE_BIAS, DOWN_BIAS, ADD, NEXT (whether the next norm is begun), WIDE_NORM (whether its
// weight is float32). PARTS is 0 if experts are given.
#define AS_TRITON_DIVIDES
#include "activations.cuh"
#include "expert_row/choice.cuh"
#include "expert_row/codes.cuh"
#include "exchange.cuh"

// ---- A matrix: steps of a row, its bytes; scales of its columns and rows ----
constexpr int GATE_STEPS = steps_of(WIDTH), DOWN_STEPS = steps_of(INNER);
constexpr int GATE_ROW = GATE_STEPS * STEP_BYTES, DOWN_ROW = DOWN_STEPS * STEP_BYTES;
constexpr int GATE_GROUPS = groups_of(WIDTH, GATE_GROUP);
constexpr int DOWN_GROUPS = groups_of(INNER, DOWN_GROUP);
constexpr int GATE_ROWS = 2 * INNER / GATE_HEIGHT, DOWN_ROWS = WIDTH / DOWN_HEIGHT;
// Items of gate and up, for an expert; of down.
constexpr int GATE_TILES = INNER / 8, DOWN_TILES = WIDTH / 8;
static_assert(GATE_TILES * 8 == INNER && DOWN_TILES * 8 == WIDTH, "whole items");

// ---- The work of warps ----
// Shares of the columns of gate and up, each of which is added by itself.
constexpr int GATE_SHARES = 4;
// Parts of an item of gate and up, one for each warp of a team; parts of a pair of experts of down.
constexpr int GATE_PARTS = (GATE_STEPS + GATE_AT_ONCE - 1) / GATE_AT_ONCE;
constexpr int DOWN_PARTS = (DOWN_STEPS + DOWN_AT_ONCE - 1) / DOWN_AT_ONCE;
constexpr int TEAMS = WARPS / GATE_PARTS, JOBS = (CHOSEN + 1) / 2 * DOWN_PARTS;
static_assert(TEAMS * GATE_PARTS == WARPS, "teams");
static_assert(STAGES % TEAMS == 0, "all that a slot has of gate and up belongs to one team");
// Parts of a result, a power of two: some may be of no expert.
constexpr int RESULT_PARTS = SHARES * (CHOSEN > 8 ? 16 : CHOSEN > 4 ? 8 : CHOSEN > 2 ? 4 : 2);
static_assert(MOST_ITEMS <= WARPS, "a warp finishes each item of down");
// Of HELD, steps of one of a warp's first jobs of down, and these jobs.
constexpr int DOWN_HELD = HELD < DOWN_AT_ONCE ? HELD : DOWN_AT_ONCE;
constexpr int DOWN_HELD_TURNS = HELD / DOWN_HELD;

// ---- A slot of the ring: codes of 16 rows, and behind them scales and biases ----
constexpr int CODE_BYTES = 16 * (GATE_ROW > DOWN_ROW ? GATE_ROW : DOWN_ROW);
// Experts of down in a slot, and slots of an item.
constexpr int IN_SLOT = CODE_BYTES / (16 * DOWN_ROW) * 2;
constexpr int DOWN_SLOTS = (CHOSEN + IN_SLOT - 1) / IN_SLOT;
// Eight rows have a scale each, or one for all.
constexpr int GATE_SCALES = GATE_HEIGHT == 1 ? 8 : 1, DOWN_SCALES = DOWN_HEIGHT == 1 ? 8 : 1;
static_assert(GATE_SCALES == 8 || GATE_HEIGHT % 8 == 0, "rows");
static_assert(DOWN_SCALES == 8 || DOWN_HEIGHT % 8 == 0, "rows");
// Where biases are behind scales: of gate and up; of an expert of down.
constexpr int GATE_BIASES = up_to(4 * 2 * GATE_GROUPS * GATE_SCALES, 16);
constexpr int DOWN_BIASES = up_to(4 * DOWN_GROUPS * DOWN_SCALES, 16);
constexpr int GATE_BESIDE = GATE_BIASES + 32, DOWN_BESIDE = DOWN_BIASES + 16;
constexpr int BEHIND_BESIDE = groups_of(WIDTH, BEHIND_GROUP) * (BEHIND_HEIGHT == 1 ? 64 : 8);
constexpr int SLOT_BYTES =
    CODE_BYTES + up_to(largest(GATE_BESIDE, IN_SLOT * DOWN_BESIDE, BEHIND_BESIDE), 128);

// ---- Words that blocks exchange: inner values, and the row for the product behind ----
constexpr int INNER_ROW = DOWN_STEPS * INPUT_BYTES, INNER_BYTES = CHOSEN * INNER_ROW;
// Bytes from one row of inner values to the next in shared memory, so that threads read those of two
// experts from different banks; and of all.
constexpr int INNER_APART = INNER_ROW + 32, INNER_MEMORY = up_to(CHOSEN * INNER_APART, 128);
constexpr int X_BYTES = GATE_STEPS * INPUT_BYTES;
constexpr int ROW_BYTES = X_BYTES + (BEHIND_ROWS ? up_to(4 * DOWN_TILES, 16) : 0);
constexpr int PLACE_BYTES = INNER_BYTES + (BEHIND_ROWS ? ROW_BYTES : 0);

#include "expert_row/ring.cuh"
// Uses the ring.
#include "expert_row/behind.cuh"

struct Operands {
    const u16* x;
    const unsigned char *gate_up, *down;
    const float *gate_up_scales, *down_scales;
    const u16 *gate_up_bias, *down_bias;
    // The experts and their weights, or what they are chosen from.
    const int* ids;
    const float* weights;
    Logits logits;
    u16* out;
    // Of the next norm.
    const void* next_norm;
    u16* next_weighted;
    float* next_squares;
    // Two places of words that blocks exchange, and the counter by which launches take turns with
    // them.
    char* exchanged;
    u32* counter;
    Behind behind;
};

// What a block has to do.
struct Share {
    int gate_items, down_items;

    __device__ __forceinline__ Share() {
        const int block = blockIdx.x, blocks = gridDim.x;
        gate_items = (CHOSEN * GATE_TILES - block + blocks - 1) / blocks;
        // Blocks with an item less have more of down.
        down_items = (DOWN_TILES - (blocks - 1 - block) + blocks - 1) / blocks;
    }
    // Returns an item's place among those of all experts.
    __device__ __forceinline__ int gate_tile(int item) const {
        return blockIdx.x + item * gridDim.x;
    }
    // Returns the first of an item's results.
    __device__ __forceinline__ int column(int item) const {
        return (gridDim.x - 1 - blockIdx.x + item * gridDim.x) * 8;
    }
    // Returns the content of the ring that has an expert's part of an item of down.
    __device__ __forceinline__ int content(int item, int place) const {
        return gate_items + item * DOWN_SLOTS + place / IN_SLOT;
    }
    // Returns the first content of the ring that is of the product behind.
    __device__ __forceinline__ int behind() const { return gate_items + down_items * DOWN_SLOTS; }
};

// Loads an item of gate and up, as a warp.
__device__ __forceinline__ void load_gate(
    const Ring& ring, const Operands& given, int item, int tile, int expert, u64 once) {
    const int lane = threadIdx.x % 32, column = tile % GATE_TILES * 8;
    const u64 matrix = u64(expert) * (2 * INNER);
    const float* scales = given.gate_up_scales + u64(expert) * (GATE_GROUPS * GATE_ROWS);
    ring.wait_until_empty(item);
    if (GATE_BIAS && lane < 2)
        copy_16(
            ring.beside(item) + GATE_BIASES + lane * 16,
            given.gate_up_bias + matrix + column + lane * INNER, 16);
    load_eights<GATE_GROUPS, GATE_SCALES, GATE_HEIGHT>(
        ring, item, given.gate_up + matrix * GATE_ROW, scales, GATE_ROWS, column, INNER, 2, once);
}

// Loads an item of down, as a warp.
__device__ __forceinline__ void load_down(
    const Ring& ring, const Share& share, const int* ids, const Operands& given, int item,
    u64 once) {
    const int lane = threadIdx.x % 32, column = share.column(item);
    for (int begin = 0; begin < CHOSEN; begin += IN_SLOT) {
        const int count = min(IN_SLOT, CHOSEN - begin), index = share.content(item, begin);
        const u32 full = ring.is_full(index);
        ring.wait_until_empty(index);
        for (int i = 0; i < count; i++) {
            const u64 expert = ids[begin + i];
            const u32 beside = ring.beside(index) + i * DOWN_BESIDE;
            copy_scales<DOWN_GROUPS, DOWN_SCALES>(
                beside,
                given.down_scales + expert * (DOWN_GROUPS * DOWN_ROWS) + column / DOWN_HEIGHT,
                DOWN_ROWS, 4 * DOWN_SCALES);
            if (DOWN_BIAS && lane == i)
                copy_16(beside + DOWN_BIASES, given.down_bias + expert * WIDTH + column, 16);
        }
        arrive_when_copied(full);
        if (lane == 0) {
            barrier_expect(full, count * 8 * DOWN_ROW);
            for (int i = 0; i < count; i++)
                load_bytes_by(
                    ring.content(index) + i * 8 * DOWN_ROW,
                    given.down + (u64(ids[begin + i]) * WIDTH + column) * DOWN_ROW, 8 * DOWN_ROW,
                    full, once);
        }
        __syncwarp();
    }
}

// Chooses the experts and loads codes, as a warp. The first codes are asked for before the last
// experts are chosen, and one after the other: else the first would come as late as the last.
__device__ __forceinline__ void load(
    const Ring& ring, const Share& share, int* ids, const Operands& given) {
    const int lane = threadIdx.x % 32;
    const u64 once = read_once();
    int item = 0;
    if (PARTS > 0) {
        Choice choice(given.logits);
        for (int place = 0; place < CHOSEN; place++) {
            int index = EXPERTS;
            if (place < CHOSEN - JOINED) choice.take(index);
            if (lane == 0) ids[place] = index;
            for (; item < min(share.gate_items, STAGES); item++) {
                const int tile = share.gate_tile(item);
                if (tile / GATE_TILES > place) break;
                load_gate(ring, given, item, tile, index, once);
            }
        }
    } else if (lane < CHOSEN) {
        ids[lane] = given.ids[lane];
    }
    __syncwarp();
    for (; item < share.gate_items; item++) {
        const int tile = share.gate_tile(item);
        load_gate(ring, given, item, tile, ids[tile / GATE_TILES], once);
    }
    for (int i = 0; i < share.down_items; i++) load_down(ring, share, ids, given, i, once);
    if (!BEHIND_ROWS) return;
    // What is asked for now, the inner values would wait behind.
    named_sync<32 * (WARPS + 1)>(3);
    load_behind(ring, share.behind(), given.behind, once);
}

// ---- Inputs and sums of steps ----

// Copies x to shared memory, eight numbers a thread. Behind the last one are zeros.
__device__ __forceinline__ void copy_x(char* target, const u16* x) {
    for (int column = threadIdx.x * 8; column < GATE_STEPS * STEP; column += WARPS * 32 * 8) {
        uint4 eight = make_uint4(0, 0, 0, 0);
        if (column < WIDTH) eight = *reinterpret_cast<const uint4*>(x + column);
#pragma unroll
        for (int i = 0; i < 4; i++)
            *reinterpret_cast<u32*>(target + place_of_input(column + 2 * i)) = word_of(eight, i);
    }
}

// Returns the sum of powers of two of parts, in the order in which a warp's threads add them.
template <int COUNT>
__device__ __forceinline__ float sum_of_parts(const float* parts, int apart) {
    if constexpr (COUNT == 1) return parts[0];
    else
        return sum_of_parts<COUNT / 2>(parts, 2 * apart) +
            sum_of_parts<COUNT / 2>(parts + apart, 2 * apart);
}

// ---- Gate and up ----

// Multiplies a warp's steps of its team's items.
__device__ __forceinline__ void multiply_gate(const Ring& ring, const Share& share, u32 x) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first = warp % GATE_PARTS * GATE_AT_ONCE;
    for (int item = warp / GATE_PARTS; item < share.gate_items; item += TEAMS) {
        ring.wait_until_full(item);
        const u32 own = ring.beside(item) + (GATE_SCALES > 1 ? lane / 4 * 4 : 0);
        float scales[GATE_AT_ONCE][2];
        read_scales<GATE_AT_ONCE, GATE_STEPS, GATE_GROUP>(
            scales, own, own + 4 * GATE_SCALES, first, 8 * GATE_SCALES);
        multiply_steps<GATE_AT_ONCE, GATE_ROW, GATE_STEPS>(ring.content(item), x, first, 2, scales);
        if (lane == 0) barrier_arrive_here(ring.is_done(item));
    }
}

// Writes the inner value of each of eight threads.
__device__ __forceinline__ void write_inner(float value, int tile, char* inner) {
    const int lane = threadIdx.x % 32, column = tile % GATE_TILES * 8;
    const float next = __shfl_down_sync(~0u, value, 1);
    char* target = inner + tile / GATE_TILES * INNER_ROW;
    if (lane >= 8 || lane % 2) return;
    give_word(target + place_of_input(column + lane), packed(value, next));
    // Behind the last inner value are zeros.
    if (column + 8 == INNER)
        for (int filled = INNER + lane; filled < DOWN_STEPS * STEP; filled += 8)
            give_word(target + place_of_input(filled), 0);
}

// Adds the steps of all items, and writes inner values, as a warp. A thread has a row of gate or of
// up, and two shares of its columns.
__device__ __forceinline__ void finish_gate(
    const Ring& ring, const Share& share, char* inner) {
    const int lane = threadIdx.x % 32, row = lane % 16, half = row / 8;
    for (int item = 0; item < share.gate_items; item++) {
        barrier_wait(ring.is_done(item), ring.phase(item));
        const u32 sums = ring.content(item) + row * 4, beside = ring.beside(item);
        const u32 scales = beside + (half * GATE_SCALES + (GATE_SCALES > 1 ? row % 8 : 0)) * 4;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float added = sum_of_share<GATE_GROUP, GATE_STEPS, GATE_SHARES>(
                sums, scales, lane / 16 + 2 * i, 8 * GATE_SCALES);
            sum = i ? sum + added : added;
        }
        const float bias = GATE_BIAS ? widened(half_word(beside + GATE_BIASES + row * 2)) : 0.0f;
        // The copy engine writes next where threads have read and written.
        shared_memory_fence();
        __syncwarp();
        if (lane == 0) barrier_arrive_here(ring.is_empty(item));
        sum += __shfl_xor_sync(~0u, sum, 16);
        if (GATE_BIAS) sum += bias;
        write_inner(activated(sum, __shfl_down_sync(~0u, sum, 8)), share.gate_tile(item), inner);
    }
}

// ---- Down ----

// Returns where an expert's codes of an item are.
__device__ __forceinline__ u32 codes_of_expert(
    const Ring& ring, const Share& share, int item, int place) {
    return ring.content(share.content(item, place)) + place % IN_SLOT * 8 * DOWN_ROW;
}

// Returns where an expert's scales of an item are.
__device__ __forceinline__ u32 beside_expert(
    const Ring& ring, const Share& share, int item, int place) {
    return ring.beside(share.content(item, place)) + place % IN_SLOT * DOWN_BESIDE;
}

// A warp's pair of experts, and some of their steps, of an item.
struct DownJob {
    int item, place, other, first;

    __device__ __forceinline__ DownJob(int turn) {
        const int job = threadIdx.x / 32 + turn * WARPS, of_item = job % JOBS;
        item = job / JOBS;
        place = of_item / DOWN_PARTS * 2, other = min(place + 1, CHOSEN - 1);
        first = of_item % DOWN_PARTS * DOWN_AT_ONCE;
    }
};

// Waits for a job's codes, and reads the scales that they are decoded with.
__device__ __forceinline__ void wait_for_down(
    const Ring& ring, const Share& share, const DownJob& job, float (&scales)[DOWN_AT_ONCE][2]) {
    const u32 row = DOWN_SCALES > 1 ? threadIdx.x % 32 / 4 * 4 : 0;
    ring.wait_until_full(share.content(job.item, job.place));
    read_scales<DOWN_AT_ONCE, DOWN_STEPS, DOWN_GROUP>(
        scales, beside_expert(ring, share, job.item, job.place) + row,
        beside_expert(ring, share, job.item, job.other) + row, job.first, 4 * DOWN_SCALES);
}

// Decodes the steps that a warp holds in registers, while it has to wait for the inner values.
__device__ __forceinline__ void decode_down(
    const Ring& ring, const Share& share, Numbers (&held)[HELD]) {
#pragma unroll
    for (int turn = 0; turn < DOWN_HELD_TURNS; turn++) {
        const DownJob job(turn);
        if (job.item >= share.down_items) break;
        float scales[DOWN_AT_ONCE][2];
        wait_for_down(ring, share, job, scales);
        decode_steps<DOWN_AT_ONCE, DOWN_ROW, DOWN_STEPS, DOWN_HELD>(
            codes_of_expert(ring, share, job.item, job.place), job.first, scales,
            held + turn * DOWN_HELD);
    }
}

// Multiplies a warp's job, of which it holds some steps.
template <int COUNT>
__device__ __forceinline__ void multiply_down_job(
    const Ring& ring, const Share& share, const DownJob& job, u32 inner, u32 done,
    const Numbers* held = nullptr) {
    const int lane = threadIdx.x % 32;
    // Columns of the second operand are inner values of both experts, in turn.
    const u32 inputs = inner + (lane / 4 % 2 ? job.other : job.place) * INNER_APART;
    float scales[DOWN_AT_ONCE][2];
    wait_for_down(ring, share, job, scales);
    multiply_steps<DOWN_AT_ONCE, DOWN_ROW, DOWN_STEPS, COUNT>(
        codes_of_expert(ring, share, job.item, job.place), inputs, job.first, 3, scales, held);
    if (lane == 0) barrier_arrive_here(done + 8 * job.item);
}

// Multiplies a warp's pairs of experts and some of their steps, of all items.
__device__ __forceinline__ void multiply_down(
    const Ring& ring, const Share& share, u32 inner, u32 done, const Numbers (&held)[HELD]) {
#pragma unroll
    for (int turn = 0; turn < DOWN_HELD_TURNS; turn++) {
        const DownJob job(turn);
        if (job.item >= share.down_items) return;
        multiply_down_job<DOWN_HELD>(ring, share, job, inner, done, held + turn * DOWN_HELD);
    }
    constexpr int TURNS = (MOST_ITEMS * JOBS + WARPS - 1) / WARPS;
    for (int turn = DOWN_HELD_TURNS; turn < TURNS; turn++) {
        const DownJob job(turn);
        if (job.item >= share.down_items) return;
        multiply_down_job<0>(ring, share, job, inner, done);
    }
}

__device__ __forceinline__ float norm_weight(const Operands& given, int column) {
    return WIDE_NORM ? static_cast<const float*>(given.next_norm)[column]
                     : widened(static_cast<const u16*>(given.next_norm)[column]);
}

// Adds the experts' parts of eight results, and begins the next norm, as a warp. A thread has a
// result, and every fourth part. before, norms: of all items' results.
__device__ __forceinline__ void finish_down(
    const Ring& ring, const Share& share, int item, const float* weights, u32 done,
    const float* before, const float* norms, const Operands& given, char* row_place) {
    constexpr int OWN = RESULT_PARTS > 4 ? RESULT_PARTS / 4 : 1;
    const int lane = threadIdx.x % 32, row = lane % 8, column = share.column(item);
    const int at = column + row;
    float values[OWN];
    barrier_wait(done + 8 * item, 0);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const int part = lane / 8 + 4 * i, place = min(part / SHARES, CHOSEN - 1);
        const u32 both = codes_of_expert(ring, share, item, place / 2 * 2);
        const u32 sums = both + place % 2 * 32 + row * 4;
        const u32 beside = beside_expert(ring, share, item, place);
        float sum = sum_of_share<DOWN_GROUP, DOWN_STEPS, SHARES>(
            sums, beside + (DOWN_SCALES > 1 ? row * 4 : 0), part % SHARES, 4 * DOWN_SCALES);
        if (DOWN_BIAS && part % SHARES == 0)
            sum += widened(half_word(beside + DOWN_BIASES + row * 2));
        values[i] = part < SHARES * CHOSEN ? __fmul_rn(sum, weights[place]) : 0.0f;
    }
    float result = sum_of_parts<OWN>(values, 1);
    result += __shfl_xor_sync(~0u, result, 16);
    result += __shfl_xor_sync(~0u, result, 8);
    if (ADD) result += before[item * 8 + row];
    if (BEHIND_ROWS) {
        shared_memory_fence();
        __syncwarp();
        if (lane < DOWN_SLOTS) barrier_arrive_here(ring.is_empty(share.content(item, 0) + lane));
    }
    const u16 bits = u16(packed(result, 0.0f));
    if (lane < 8) given.out[at] = bits;
    if (!NEXT) return;
    const float wide = widened(bits), weighted = wide * norms[item * 8 + row];
    float square = wide * wide;
#pragma unroll
    for (int apart = 4; apart > 0; apart /= 2) square += __shfl_xor_sync(~0u, square, apart);
    if (BEHIND_ROWS) {
        give_to_behind(weighted, square, column, row_place);
        return;
    }
    if (lane < 8) given.next_weighted[at] = u16(packed(weighted, 0.0f));
    if (lane == 0) given.next_squares[column / 8] = square;
}

extern "C" __global__ void __launch_bounds__(32 * (WARPS + 2), 1) expert_row(
    const __grid_constant__ Operands given, const __grid_constant__ Factors factors) {
    extern __shared__ __align__(128) char memory[];
    __shared__ __align__(16) char x[ROW_BYTES];
    __shared__ int ids[CHOSEN];
    __shared__ float weights[CHOSEN];
    __shared__ float before[8 * MOST_ITEMS], norms[8 * MOST_ITEMS];
    __shared__ u32 place;
    __shared__ __align__(8) u64 barriers[3 * STAGES + MOST_ITEMS];
    const u32 first = shared_address(barriers), done = first + 24 * STAGES;
    const Ring ring{
        shared_address(memory) + INNER_MEMORY, first, first + 8 * STAGES, first + 16 * STAGES};
    if (threadIdx.x == 0) {
        ring.init();
        for (int item = 0; item < MOST_ITEMS; item++) barrier_init(done + 8 * item, JOBS);
        barrier_init_done();
    }
    __syncthreads();
    wait_for_kernels_before();
    if (!BEHIND_LATE) let_next_kernel_start();
    const Share share;
    const int warp = threadIdx.x / 32;
    if (warp == WARPS) {
        load(ring, share, ids, given);
    } else if (warp == WARPS + 1) {
        const int lane = threadIdx.x % 32;
        const u32 own = lane == 0 ? place_of_launch(given.counter) : 0;
        if (PARTS > 0) weigh(weights, given.logits, factors);
        else if (lane < CHOSEN) weights[lane] = given.weights[lane];
        if (lane == 0) place = own;
        __syncwarp();
        named_arrive<32 * (WARPS + 1)>(2);
        clear_share<PLACE_BYTES>(given.exchanged + (place ^ 1) * PLACE_BYTES);
        finish_gate(ring, share, given.exchanged + place * PLACE_BYTES);
    } else {
        // What is read later would wait behind all codes.
        const int item = threadIdx.x / 8, row = threadIdx.x % 8;
        if (item < share.down_items) {
            const int own = share.column(item) + row;
            if (ADD) before[threadIdx.x] = widened(given.out[own]);
            if (NEXT) norms[threadIdx.x] = norm_weight(given, own);
        }
        copy_x(x, given.x);
        named_sync<32 * WARPS>(1);
        multiply_gate(ring, share, shared_address(x));
        named_sync<32 * (WARPS + 1)>(2);
        const auto exchanged = [&] {
            return given.exchanged + word(shared_address(&place)) * PLACE_BYTES;
        };
        Numbers held[HELD];
        decode_down(ring, share, held);
        take_words<INNER_BYTES, 32 * WARPS, INNER_ROW, INNER_APART>(memory, exchanged());
        named_sync<32 * WARPS>(1);
        if (BEHIND_ROWS) named_arrive<32 * (WARPS + 1)>(3);
        multiply_down(ring, share, shared_address(memory), done, held);
        if (warp < share.down_items)
            finish_down(ring, share, warp, weights, done, before, norms, given,
                exchanged() + INNER_BYTES);
        if (!BEHIND_ROWS) return;
        // A slot's time is odd or even. So whoever waits for codes of QKV has to know that those of
        // down are there, which warps know of their own jobs alone.
        named_sync<32 * WARPS>(1);
        decode_behind(ring, share.behind(), held);
        take_words<ROW_BYTES, 32 * WARPS>(x, exchanged() + INNER_BYTES);
        named_sync<32 * WARPS>(1);
        multiply_behind(ring, share.behind(), shared_address(x), held);
        named_sync<32 * WARPS>(1);
        if (BEHIND_LATE) let_next_kernel_start();
        finish_behind(ring, share.behind(), given.behind, shared_address(x) + X_BYTES, factors.eps);
    }
}
