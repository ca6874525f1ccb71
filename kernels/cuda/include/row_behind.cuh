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

// Multiplies a warp's shares of the block's items with the row.
__device__ __forceinline__ void multiply_behind(const Ring& ring, int first, u32 x) {
    constexpr int PER_GROUP = BEHIND_GROUP ? BEHIND_GROUP / STEP : GATE_STEPS;
    const int lane = threadIdx.x % 32, jobs = (behind_items() + 1) / 2 * BEHIND_SPLIT;
    for (int job = threadIdx.x / 32; job < jobs; job += WARPS) {
        const int index = first + job / BEHIND_SPLIT, begin = job % BEHIND_SPLIT * BEHIND_TURNS;
        const u32 codes = ring.content(index) + lane / 4 * GATE_ROW + lane % 4 * 16;
        const u32 own = ring.beside(index) + (BEHIND_SCALES > 1 ? lane / 4 * 4 : 0);
        float sum[4] = {};
        ring.wait_until_full(index);
#pragma unroll 2
        for (int turn = 0; turn < BEHIND_TURNS; turn++) {
            const int step = begin + turn;
            if (GATE_STEPS % BEHIND_TURNS != 0 && step >= GATE_STEPS) break;
            const u32 place = own + step / PER_GROUP * 8 * BEHIND_SCALES;
            const bool asks = ASKS || BEHIND_GROUP;
            const float scales[2] = {
                asks ? number(place) : 0.0f, asks ? number(place + 4 * BEHIND_SCALES) : 0.0f};
            uint4 inputs[4];
            read_inputs(inputs, x + step * INPUT_BYTES);
            const u32 low = codes + step * STEP_BYTES;
            if (BEHIND_GROUP) {
                float product[4] = {};
                multiply_step(product, low, low + 8 * GATE_ROW, inputs, scales);
#pragma unroll
                for (int i = 0; i < 4; i++)
                    sum[i] = fmaf(product[i], without_zero(scales[i / 2]), sum[i]);
            } else {
                multiply_step(sum, low, low + 8 * GATE_ROW, inputs, scales);
            }
        }
        // The warp has read the codes that it writes over.
        __syncwarp();
        put(sum, 2, ring.content(index) + begin * STEP_BYTES);
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
