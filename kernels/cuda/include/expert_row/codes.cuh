// Products of codes and a row's inputs: 16 rows of a matrix and steps of 128 columns.
//
// Codes are those of kernels/quantized/device_matrix.py, and MXFP4's bits those of
// kernels/experts/expert_codes.py.
//
// Given: what int4.cuh says, and KIND (of codes).
#pragma once
#include "int4.cuh"

constexpr int FP8 = 0, INT8 = 1, INT4 = 2, MXFP4 = 3;
constexpr bool EIGHT_BITS = KIND == FP8 || KIND == INT8;
// Whether sums are multiplied by scales, and whether codes are decoded with them.
constexpr bool SCALED = KIND != MXFP4, ASKS = KIND == MXFP4 || ZEROS;
// Columns of a step; bytes of its codes of a row, and of its inputs.
constexpr int STEP = 128, STEP_BYTES = EIGHT_BITS ? 128 : 64, INPUT_BYTES = 2 * STEP;

__device__ constexpr int steps_of(int columns) { return (columns + STEP - 1) / STEP; }
__device__ constexpr int groups_of(int columns, int group) {
    return group ? (columns + group - 1) / (group ? group : 1) : 1;
}
__device__ constexpr int up_to(int bytes, int whole) { return (bytes + whole - 1) / whole * whole; }
__device__ constexpr int largest(int a, int b, int c) {
    return a > b ? (a > c ? a : c) : b > c ? b : c;
}

// Returns two numbers of a word of four codes: of columns 2 t and 2 t + 1, or of those 8 behind.
__device__ __forceinline__ u32 of_eight_bits(u32 word, bool behind) {
    if (KIND == FP8) {
        constexpr u32 MASK = HALF ? 0x3F803F80 : 0x07F007F0;
        constexpr u32 FACTOR = HALF ? 0x5C005C00 : 0x7B807B80;
        const u32 high = behind ? word << 8 : word;
        return multiplied(high & 0x80008000 | high >> (HALF ? 1 : 4) & MASK, FACTOR);
    }
    const u32 low = behind ? word : word >> 8;
    constexpr u32 ONE = HALF ? 0x64006400 : 0x43004300;
    return subtracted(low & 0x007F007F | ONE, low & 0x00800080 | ONE);
}

// Returns two numbers of a word of eight codes, of which `place` says which. given: of INT4 what is
// added to its numbers, of MXFP4 a power of two, twice.
__device__ __forceinline__ u32 of_four_bits(u32 word, int place, u32 given) {
    if (KIND == INT4) return of_int4(word, place, given);
    constexpr u32 BITS = 0x81C081C0;
    const u32 found = place == 0 ? word << 6 & BITS
        : place == 1             ? word << 2 & BITS
        : place == 2             ? __funnelshift_r(word, word, 4) & BITS
                                 : word & 0x81808180 | word >> 8 & 0x00400040;
    return multiplied(found, given);
}

// Returns what the numbers of a step's word c are decoded with.
__device__ __forceinline__ u32 given_for(float scale, int c) {
    if (KIND == INT4) return offset_of(scale);
    // The scale's byte c is the exponent of a power of two. It is multiplied by 2^63.
    return __byte_perm(__float_as_uint(scale), 0, 0x4040 + 0x0101 * c) * 128 + 63 * 0x00800080;
}

// Adds the product of 16 rows and 16 columns, and eight columns of inputs.
__device__ __forceinline__ void multiply_16(
    float (&sum)[4], const u32 (&rows)[4], u32 low, u32 high) {
    if (HALF)
        asm(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
            "{%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "r"(low), "r"(high));
    else
        asm(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
            "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "r"(low), "r"(high));
}

// A step's numbers of 16 rows: a thread's words of the first operand of each product.
struct Numbers {
    u32 rows[STEP / 16][4];
};

// Decodes a step's codes of two rows, at these addresses.
__device__ __forceinline__ void decode_step(
    Numbers& numbers, u32 first, u32 second, const float (&scales)[2]) {
    if (EIGHT_BITS) {
        // All rows begin in the same bank of shared memory. So odd rows are read from their second
        // half on: eight threads read at a time, of two rows, and none waits for another.
        const bool odd = threadIdx.x & 4;
        const u32 begin = odd ? 64 : 0;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 row = half ? second : first;
            const uint4 found[2] = {four_words(row + begin), four_words(row + (begin ^ 64))};
#pragma unroll
            for (int piece = 0; piece < 2; piece++) {
                const uint4 four = odd ? found[1 - piece] : found[piece];
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    u32(&rows)[4] = numbers.rows[4 * piece + c];
                    rows[half] = of_eight_bits(word_of(four, c), false);
                    rows[half + 2] = of_eight_bits(word_of(four, c), true);
                }
            }
        }
        return;
    }
    const uint4 low = four_words(first), high = four_words(second);
#pragma unroll
    for (int c = 0; c < 4; c++) {
        const u32 given[2] = {given_for(scales[0], c), given_for(scales[1], c)};
        const u32 one = word_of(low, c), two = word_of(high, c);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32(&rows)[4] = numbers.rows[2 * c + j / 2];
            rows[j % 2 * 2] = of_four_bits(one, j, given[0]);
            rows[j % 2 * 2 + 1] = of_four_bits(two, j, given[1]);
        }
    }
}

// Adds the product of a step's numbers and its inputs, at this address.
__device__ __forceinline__ void multiply_numbers(float (&sum)[4], const Numbers& numbers, u32 x) {
    const int quad = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint4 four = four_words(x + quad * 64 + ((i ^ quad / 2) << 4));
        multiply_16(sum, numbers.rows[2 * i], four.x, four.y);
        multiply_16(sum, numbers.rows[2 * i + 1], four.z, four.w);
    }
}

// Adds the product of a step's codes of two rows, at these addresses, and its inputs.
__device__ __forceinline__ void multiply_step(
    float (&sum)[4], u32 first, u32 second, u32 x, const float (&scales)[2]) {
    Numbers numbers;
    decode_step(numbers, first, second, scales);
    multiply_numbers(sum, numbers, x);
}

// Returns where the word of two neighbouring inputs is. A thread finds all that it needs of a step
// in 64 bytes, and four threads' reads do not meet.
__device__ __forceinline__ int place_of_input(int column) {
    const int quad = column % 8 / 2, word = column % STEP / 8;
    return column / STEP * INPUT_BYTES + quad * 64 + ((word / 4 ^ quad / 2) << 4) + word % 4 * 4;
}

// Writes the sums of a step, 16 rows, in place of its codes. Of the second eight rows, sum `second`
// is the right one.
__device__ __forceinline__ void put(const float (&sum)[4], int second, u32 place) {
    const int lane = threadIdx.x % 32;
    if (lane % 4 > 0) return;
    write_number(place + lane, sum[0]);
    write_number(place + 32 + lane, sum[second]);
}

// Returns the sum of every WAYS-th step from `share` on. sums, scales: of a row, of the first step
// and of the first columns. apart: bytes between scales.
template <int GROUP, int STEPS, int WAYS>
__device__ __forceinline__ float sum_of_share(u32 sums, u32 scales, int share, int apart) {
    constexpr int TURNS = (STEPS + WAYS - 1) / WAYS, PER_GROUP = GROUP ? GROUP / STEP : STEPS;
    float sum = 0.0f;
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        const int step = share + turn * WAYS;
        if (STEPS % WAYS == 0 || step < STEPS) {
            const float part = number(sums + step * STEP_BYTES);
            sum = SCALED && GROUP
                ? fmaf(part, without_zero(number(scales + step / PER_GROUP * apart)), sum)
                : sum + part;
        }
    }
    if (!SCALED) return sum * 0x1p63f;
    // The product is rounded before it is added to anything.
    return GROUP ? sum : __fmul_rn(sum, without_zero(number(scales)));
}

// Returns where a thread's codes of a step are, of its first row.
template <int ROW>
__device__ __forceinline__ u32 codes_of_thread(u32 step) {
    const int lane = threadIdx.x % 32;
    return step + lane / 4 * ROW + lane % 4 * 16;
}

// Multiplies COUNT steps from `first` on, and leaves their sums in place of their codes. content,
// inputs: of the first step. second: as of put. held: numbers of the first OWN ones.
template <int COUNT, int ROW, int STEPS, int OWN = 0>
__device__ __forceinline__ void multiply_steps(
    u32 content, u32 inputs, int first, int second, const float (&scales)[COUNT][2],
    const Numbers* held = nullptr) {
    const u32 codes = codes_of_thread<ROW>(content + first * STEP_BYTES);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        if (STEPS % COUNT != 0 && first + i >= STEPS) break;
        const u32 x = inputs + (first + i) * INPUT_BYTES;
        const u32 own = codes + i * STEP_BYTES;
        float sum[4] = {};
        if (i < OWN) multiply_numbers(sum, held[i], x);
        else multiply_step(sum, own, own + 8 * ROW, x, scales[i]);
        put(sum, second, content + (first + i) * STEP_BYTES);
    }
    __syncwarp();
}

// Decodes OWN of COUNT steps from `first` on, as multiply_steps needs them.
template <int COUNT, int ROW, int STEPS, int OWN>
__device__ __forceinline__ void decode_steps(
    u32 content, int first, const float (&scales)[COUNT][2], Numbers* held) {
    const u32 codes = codes_of_thread<ROW>(content + first * STEP_BYTES);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        if (STEPS % COUNT != 0 && first + i >= STEPS) break;
        const u32 own = codes + i * STEP_BYTES;
        decode_step(held[i], own, own + 8 * ROW, scales[i]);
    }
}

// Reads the scales of some steps, of two rows, if their codes are decoded with them.
template <int COUNT, int STEPS, int GROUP>
__device__ __forceinline__ void read_scales(
    float (&scales)[COUNT][2], u32 low, u32 high, int first, int apart) {
    constexpr int PER_GROUP = GROUP ? GROUP / STEP : STEPS;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const int at = min(first + i, STEPS - 1) / PER_GROUP * apart;
        scales[i][0] = ASKS ? number(low + at) : 0.0f;
        scales[i][1] = ASKS ? number(high + at) : 0.0f;
    }
}
