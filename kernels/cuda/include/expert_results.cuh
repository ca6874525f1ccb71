// What becomes of the sums of a tile: bias, activation, and how results are written.
//
// A thread has two neighbouring numbers of each 8 columns, of two rows that are 8 apart: those of
// columns 8 j + 2 quad lie at 4 j, of the second row at 4 j + 2. Of gate and up, the second half of
// the sums is up.
#pragma once
#include "activations.cuh"

// What sums of an expert's columns are multiplied by and what is added: null without it.
struct Columns {
    const float* scales;
    const u16* bias;
    int outputs;

    // Returns sums of columns n and n + 1 of gate or the only matrix, or those of up.
    __device__ __forceinline__ float2 finished(float first, float second, int n, bool up) const {
        const int at = min(n, outputs - 2) + (up ? outputs : 0);
        if (ROW_SCALES) {
            const float* own = scales + at;
            first *= __ldg(own), second *= __ldg(own + 1);
        }
        if (WITH_BIAS) {
            const float2 added = widened_two(__ldg(reinterpret_cast<const u32*>(bias + at)));
            first += added.x, second += added.y;
        }
        return make_float2(first, second);
    }

    // Returns the results of columns 8 j + 2 quad and the next one, of the first or second row.
    template <int SUMS>
    __device__ __forceinline__ float2 results(
        const float (&sum)[SUMS], int column, int j, int half) const {
        const int at = 4 * j + 2 * half, n = column + 8 * j + 2 * (threadIdx.x % 4);
        float2 found = finished(sum[at], sum[at + 1], n, false);
        if (GATED) {
            const float* other = sum + SUMS / 2;
            const float2 up = finished(other[at], other[at + 1], n, true);
            found = make_float2(activated(found.x, up.x), activated(found.y, up.y));
        }
        return found;
    }
};

// Writes the results of two rows in 16 bits. targets: where the rows begin, or null.
template <int OUTPUTS, int SUMS>
__device__ __forceinline__ void write_numbers(
    const float (&sum)[SUMS], u16* const (&targets)[2], int column, const Columns& columns) {
    const int quad = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < OUTPUTS / 8; j += 2)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float2 low = columns.results(sum, column, j, half);
            const float2 high = columns.results(sum, column, j + 1, half);
            const uint2 four = four_columns(packed(low.x, low.y), packed(high.x, high.y));
            const int n = column + 8 * (j + quad / 2) + 4 * (quad & 1);
            if (targets[half] && n < columns.outputs)
                *reinterpret_cast<uint2*>(targets[half] + n) = four;
        }
}

// Writes the results of two rows in e4m3, 128 columns with a scale: codes in the order of
// kernels/quantized/device_matrix.py. targets, scales: of the two rows, at these columns.
template <int SUMS>
__device__ __forceinline__ void write_codes(
    const float (&sum)[SUMS], unsigned char* const (&targets)[2], float* const (&scales)[2],
    int column, const Columns& columns) {
    const int quad = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float2 found[16];
        // The bits of absolute values have their order, NaN above all.
        u32 largest = 0;
#pragma unroll
        for (int j = 0; j < 16; j++) {
            found[j] = columns.results(sum, column, j, half);
            if (column + 8 * j + 2 * quad >= columns.outputs) found[j] = make_float2(0.0f, 0.0f);
            largest = max(largest, __float_as_uint(found[j].x) & 0x7FFFFFFF);
            largest = max(largest, __float_as_uint(found[j].y) & 0x7FFFFFFF);
        }
        largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
        const float size = __uint_as_float(largest);
        const float scale = (size < 1e-30f ? 1e-30f : size) / 448.0f;
        const float inverse = 1.0f / scale;
        if (quad == 0) *scales[half] = scale;
#pragma unroll
        for (int piece = 0; piece < 2; piece++) {
            u32 words[4];
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const float2 low = found[8 * piece + 2 * c], high = found[8 * piece + 2 * c + 1];
                words[c] = u32(codes_of(high.x * inverse, low.x * inverse)) |
                    (u32(codes_of(high.y * inverse, low.y * inverse)) << 16);
            }
            *reinterpret_cast<uint4*>(targets[half] + 64 * piece + 16 * quad) =
                make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
}
