// The product behind the experts of a row, whose codes go through the same ring.
//
// It is that of kernels/products/one_row_codes_gluon.py, and adds in its order: shares of a row's
// steps are added by themselves, and then one to the other. An item is eight results. A slot of the
// ring has the codes of two.
//
// Given: BEHIND_ROWS (results, or 0 without this product), BEHIND_GROUP and BEHIND_HEIGHT (columns
// and rows that share a scale; 0 for all columns), BEHIND_SPLIT (shares of the steps), BEHIND_LATE
// (whether programs of the next kernel start when all blocks are nearly done: those that start on
// the first processors that are free are too many there), and what the kernel says of its rows.
#pragma once

constexpr int BEHIND_GROUPS = groups_of(WIDTH, BEHIND_GROUP);
constexpr int BEHIND_SCALES = BEHIND_HEIGHT == 1 ? 8 : 1;
static_assert(BEHIND_SCALES == 8 || BEHIND_HEIGHT % 8 == 0, "rows");
constexpr int BEHIND_TILES = BEHIND_ROWS / 8;
static_assert(BEHIND_TILES * 8 == BEHIND_ROWS, "whole items");
constexpr int BEHIND_TURNS = (GATE_STEPS + BEHIND_SPLIT - 1) / BEHIND_SPLIT;
// Steps of its first share that a warp holds.
constexpr int BEHIND_HELD = HELD < BEHIND_TURNS ? HELD : BEHIND_TURNS;
static_assert((BEHIND_SPLIT - 1) * BEHIND_TURNS < GATE_STEPS, "a share without steps has no place");

struct Behind {
    const unsigned char* codes;
    const float* scales;
    u16* out;
};

// Returns the number of a block's items, and an item's first row.
__device__ __forceinline__ int behind_items() {
    return (BEHIND_TILES - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x);
}
__device__ __forceinline__ int behind_row(int item) {
    return (blockIdx.x + item * gridDim.x) * 8;
}

// Loads the codes and scales of all items, as a warp. first: the content of the ring.
__device__ __forceinline__ void load_behind(
    const Ring& ring, int first, const Behind& behind, u64 once) {
    constexpr int SCALE_ROWS = (BEHIND_ROWS + BEHIND_HEIGHT - 1) / BEHIND_HEIGHT;
    const int items = behind_items();
    for (int item = 0; item < items; item += 2) {
        ring.wait_until_empty(first + item / 2);
        load_eights<BEHIND_GROUPS, BEHIND_SCALES, BEHIND_HEIGHT>(
            ring, first + item / 2, behind.codes, behind.scales, SCALE_ROWS, behind_row(item),
            8 * gridDim.x, min(2, items - item), once);
    }
}

// Gives eight values of the row, less the norm's factor, and the sum of their squares, as a warp.
// A thread has the value behind `column` that its number in eight says.
__device__ __forceinline__ void give_to_behind(
    float value, float square, int column, char* row) {
    const int lane = threadIdx.x % 32;
    const float next = __shfl_down_sync(~0u, value, 1);
    if (lane < 8 && lane % 2 == 0)
        give_word(row + place_of_input(column + lane), packed(value, next));
    if (lane == 0) give_word(row + X_BYTES + column / 2, __float_as_uint(square));
    if (column + 8 < WIDTH) return;
    // Behind the last ones are zeros.
    for (int filled = WIDTH + 2 * lane; filled < GATE_STEPS * STEP; filled += 64)
        give_word(row + place_of_input(filled), 0);
    if (lane >= DOWN_TILES % 4 && lane < up_to(DOWN_TILES % 4, 4))
        give_word(row + X_BYTES + (DOWN_TILES / 4 * 4 + lane) * 4, 0);
}

// A warp's share of the steps of two items.
struct BehindJob {
    int index, begin;
    // Of a thread's first row.
    u32 codes, scales;

    __device__ __forceinline__ BehindJob(const Ring& ring, int first, int job) {
        index = first + job / BEHIND_SPLIT, begin = job % BEHIND_SPLIT * BEHIND_TURNS;
        codes = codes_of_thread<GATE_ROW>(ring.content(index));
        scales = ring.beside(index) + (BEHIND_SCALES > 1 ? threadIdx.x % 32 / 4 * 4 : 0);
    }
    // Whether there is a step of this turn.
    __device__ __forceinline__ bool has(int turn) const {
        return GATE_STEPS % BEHIND_TURNS == 0 || begin + turn < GATE_STEPS;
    }
    __device__ __forceinline__ void read_scales(float (&found)[2], int turn) const {
        constexpr int PER_GROUP = BEHIND_GROUP ? BEHIND_GROUP / STEP : GATE_STEPS;
        const u32 place = scales + (begin + turn) / PER_GROUP * 8 * BEHIND_SCALES;
        const bool asks = ASKS || BEHIND_GROUP;
        found[0] = asks ? number(place) : 0.0f;
        found[1] = asks ? number(place + 4 * BEHIND_SCALES) : 0.0f;
    }
    __device__ __forceinline__ void decode(Numbers& numbers, int turn) const {
        const u32 low = codes + (begin + turn) * STEP_BYTES;
        float found[2];
        read_scales(found, turn);
        decode_step(numbers, low, low + 8 * GATE_ROW, found);
    }
    // Adds the product of a turn's step and the row.
    __device__ __forceinline__ void multiply(
        float (&sum)[4], const Numbers& numbers, int turn, u32 x) const {
        const u32 inputs = x + (begin + turn) * INPUT_BYTES;
        if (BEHIND_GROUP == 0) {
            multiply_numbers(sum, numbers, inputs);
            return;
        }
        float product[4] = {}, found[2];
        read_scales(found, turn);
        multiply_numbers(product, numbers, inputs);
#pragma unroll
        for (int i = 0; i < 4; i++) sum[i] = fmaf(product[i], without_zero(found[i / 2]), sum[i]);
    }
};

__device__ __forceinline__ int behind_jobs() { return (behind_items() + 1) / 2 * BEHIND_SPLIT; }

// Decodes the steps that a warp holds of its first share, while it has to wait for the row.
__device__ __forceinline__ void decode_behind(const Ring& ring, int first, Numbers (&held)[HELD]) {
    const int own = threadIdx.x / 32;
    if (own >= behind_jobs()) return;
    const BehindJob job(ring, first, own);
    ring.wait_until_full(job.index);
#pragma unroll
    for (int turn = 0; turn < BEHIND_HELD; turn++)
        if (job.has(turn)) job.decode(held[turn], turn);
}

// Multiplies a warp's shares of the block's items with the row.
__device__ __forceinline__ void multiply_behind(
    const Ring& ring, int first, u32 x, const Numbers (&held)[HELD]) {
    const int jobs = behind_jobs();
    for (int own = threadIdx.x / 32; own < jobs; own += WARPS) {
        const BehindJob job(ring, first, own);
        float sum[4] = {};
        int turn = 0;
        if (own < WARPS) {
#pragma unroll
            for (; turn < BEHIND_HELD; turn++)
                if (job.has(turn)) job.multiply(sum, held[turn], turn, x);
        } else {
            ring.wait_until_full(job.index);
        }
#pragma unroll 1
        for (; turn < BEHIND_TURNS && job.has(turn); turn++) {
            Numbers numbers;
            job.decode(numbers, turn);
            job.multiply(sum, numbers, turn, x);
        }
        // The warp has read the codes that it writes over.
        __syncwarp();
        put(sum, 2, ring.content(job.index) + job.begin * STEP_BYTES);
    }
}

// Returns the sum of neighbouring numbers, neighbours first. Behind the last of all are zeros.
template <int COUNT>
__device__ __forceinline__ float sum_of_neighbours(u32 numbers, int first, int all) {
    if constexpr (COUNT == 1) return first < all ? number(numbers + first * 4) : 0.0f;
    else
        return sum_of_neighbours<COUNT / 2>(numbers, first, all) +
            sum_of_neighbours<COUNT / 2>(numbers, first + COUNT / 2, all);
}

// Writes the results of all items. squares: parts of the sum of the row's squares.
__device__ __forceinline__ void finish_behind(
    const Ring& ring, int first, const Behind& behind, u32 squares, float eps) {
    constexpr int OWN = DOWN_TILES > 512 ? 32
        : DOWN_TILES > 256               ? 16
        : DOWN_TILES > 128               ? 8
        : DOWN_TILES > 64                ? 4
        : DOWN_TILES > 32                ? 2
                                         : 1;
    const int results = behind_items() * 8, lane = threadIdx.x % 32;
    if (threadIdx.x / 32 * 32 >= results) return;
    float factor = sum_of_neighbours<OWN>(squares, lane * OWN, DOWN_TILES);
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) factor += __shfl_xor_sync(~0u, factor, apart);
    factor = rsqrtf(divided(factor, float(WIDTH)) + eps);
    for (int result = threadIdx.x; result < results; result += 32 * WARPS) {
        const int item = result / 8, row = result % 8, index = first + item / 2, half = item % 2;
        const u32 sums = ring.content(index) + half * 32 + row * 4;
        const u32 scale =
            ring.beside(index) + (half * BEHIND_SCALES + (BEHIND_SCALES > 1 ? row : 0)) * 4;
        float total = 0.0f;
#pragma unroll
        for (int share = 0; share < BEHIND_SPLIT; share++) {
            float sum = number(sums + share * BEHIND_TURNS * STEP_BYTES);
            if (!BEHIND_GROUP) sum = __fmul_rn(sum, without_zero(number(scale)));
            total = share ? total + sum : sum;
        }
        behind.out[behind_row(item) + row] = u16(packed(__fmul_rn(total, factor), 0.0f));
    }
}
