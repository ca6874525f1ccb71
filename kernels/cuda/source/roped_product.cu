// Queries, keys and values of many rows of x: x W^T, and all that lies between it and attention. These
// are the norm of each head's query and key (where a model has it), the rotary embedding, and the write
// of keys and values into the paged cache.
//
// A tile has whole heads. Four threads have a head of a row, and each of them both halves of its pairs,
// so that it rotates them itself.
//
// The compiler is given: W_STAGES, X_STAGES, HALF (0: bfloat16, 1: float16), DIM (values of a head),
// WITH_NORMS, WITH_BIAS.
#define EIGHT 0
#include "row_products.cuh"
#include "numbers.cuh"

// Heads of a tile, and pieces of 8 columns of a head's half.
constexpr int HEADS = COLUMNS / DIM, PIECES = DIM / 16;

// Operands beside those that are multiplied, as of kernels/attention/qkv_rope_triton.py.
struct Operands {
    const u16* bias;
    const int *positions, *slots;
    const float *cos, *sin;
    const u16 *q_norm, *k_norm;
    // [T, H * DIM], and [blocks, 2 KVH, page, DIM].
    u16 *queries, *cache;
    u64 block_stride;
    // H, and 2 KVH.
    int num_heads, kept_heads;
    int page;
    float eps;
};

__device__ __forceinline__ float2 two_floats(const float* at) {
    return __ldg(reinterpret_cast<const float2*>(at));
}

// A thread's part of the rotation of a row: for columns 8 j + 2 quad and the next one of each half.
struct Angles {
    float2 cos[PIECES], sin[PIECES];

    __device__ __forceinline__ Angles(const Operands& given, int row) {
        const u64 at = u64(__ldg(given.positions + row)) * (DIM / 2) + 2 * (threadIdx.x % 4);
#pragma unroll
        for (int j = 0; j < PIECES; j++)
            cos[j] = two_floats(given.cos + at + 8 * j), sin[j] = two_floats(given.sin + at + 8 * j);
    }

    // Rotates a head.
    __device__ __forceinline__ void turn(u32 (&words)[2 * PIECES]) const {
#pragma unroll
        for (int j = 0; j < PIECES; j++) {
            const float2 x = widened_two(words[j]), y = widened_two(words[j + PIECES]);
            const float2 c = cos[j], s = sin[j];
            words[j] = packed(x.x * c.x - y.x * s.x, x.y * c.y - y.y * s.y);
            words[j + PIECES] = packed(y.x * c.x + x.x * s.x, y.y * c.y + x.y * s.y);
        }
    }
};

// A head of a row.
struct Head {
    bool query, value;
    // Where its numbers go, or null.
    u16* target;

    __device__ __forceinline__ Head(
        const Operands& given, int number, int row, int slot, int rows) {
        const int kept = number - given.num_heads;
        query = kept < 0, value = kept >= given.kept_heads / 2;
        if (query) {
            const u64 at = (u64(row) * given.num_heads + number) * DIM;
            target = row < rows ? given.queries + at : nullptr;
        } else {
            const int block = slot / given.page, offset = slot % given.page;
            const u64 at = u64(kept * given.page + offset) * DIM + block * given.block_stride;
            target = slot >= 0 && kept < given.kept_heads ? given.cache + at : nullptr;
        }
    }
};

// A head of a row, as a kernel of its own would write the product: numbers in 16 bits. Word j has
// columns 8 j + 2 quad and the next one.
using Words = u32[2 * PIECES];

// Rounds the sums of a head, whose first column is `column`, of the thread's row i.
__device__ __forceinline__ void round_sums(
    Words& words, const float (&sum)[SUMS], int first, int i, const u16* bias, int column,
    int outputs) {
#pragma unroll
    for (int j = 0; j < 2 * PIECES; j++) {
        const int at = 4 * (first + j) + 2 * i;
        float2 added = make_float2(0.0f, 0.0f);
        if (WITH_BIAS) {
            const int n = min(column + 8 * j + 2 * int(threadIdx.x % 4), outputs - 2);
            added = widened_two(__ldg(reinterpret_cast<const u32*>(bias + n)));
        }
        words[j] = WITH_BIAS ? packed(sum[at] + added.x, sum[at + 1] + added.y)
                             : packed(sum[at], sum[at + 1]);
    }
}

// Returns what its norm multiplies a head with.
__device__ __forceinline__ float norm_of(const Words& words, float eps) {
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < 2 * PIECES; j++) {
        const float2 two = widened_two(words[j]);
        squares = fmaf(two.x, two.x, fmaf(two.y, two.y, squares));
    }
    squares += __shfl_xor_sync(~0u, squares, 1);
    squares += __shfl_xor_sync(~0u, squares, 2);
    return rsqrtf(squares / DIM + eps);
}

// Norms a head. weights: the norm's in shared memory. Rounded where the models' own code rounds.
__device__ __forceinline__ void norm(Words& words, u32 weights, float eps) {
    const float scale = norm_of(words, eps);
    const u32 own = weights + threadIdx.x % 4 * sizeof(Words);
#pragma unroll
    for (int j = 0; j < 2 * PIECES; j += 4) {
        const uint4 four = four_words(own + 4 * j);
        const u32 factors[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int next = 0; next < 4; next++) {
            const float2 two = widened_two(words[j + next]);
            words[j + next] =
                multiplied(packed(two.x * scale, two.y * scale), factors[next]);
        }
    }
}

// Copies the weights of both norms to shared memory, those of a thread's columns behind one another.
// No kernel writes them.
__device__ __forceinline__ void copy_weights(u32* copies, const Operands& given) {
    for (int i = threadIdx.x; i < 2 * DIM / 2; i += blockDim.x) {
        const int quad = i / (2 * PIECES) % 4, j = i % (2 * PIECES);
        const u16* weights = i < DIM / 2 ? given.q_norm : given.k_norm;
        copies[i] = reinterpret_cast<const u32*>(weights + 8 * j)[quad];
    }
}

// Writes a head to `target`, if that is not null.
__device__ __forceinline__ void write_head(const Words& words, u16* target) {
    const int quad = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < 2 * PIECES; j += 2) {
        const uint2 four = four_columns(words[j], words[j + 1]);
        const int n = 8 * (j + quad / 2) + 4 * (quad & 1);
        if (target) *reinterpret_cast<uint2*>(target + n) = four;
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) __cluster_dims__(2, 1, 1) roped_product(
    const __grid_constant__ TileMap x_map, const __grid_constant__ TileMap w_map,
    const __grid_constant__ Operands given, const __grid_constant__ Sizes sizes, int items) {
    __shared__ __align__(16) u32 copies[DIM];
    if (WITH_NORMS) copy_weights(copies, given);
    const u32 weights = shared_address(copies);
    auto write = [&](const float(&sum)[SUMS], const Item& item, int own) {
        const int column = item.part * COLUMNS;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = item.row + own + own_row() + 8 * i;
            const int slot = row < sizes.rows ? __ldg(given.slots + row) : -1;
            // To load them earlier was slower: there are too few registers.
            const Angles angles(given, min(row, sizes.rows - 1));
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                const Head head(given, column / DIM + h, row, slot, sizes.rows);
                Words words;
                const int at = column + h * DIM;
                round_sums(words, sum, h * 2 * PIECES, i, given.bias, at, sizes.outputs);
                if (!head.value) {
                    if (WITH_NORMS) norm(words, weights + (head.query ? 0 : 2 * DIM), given.eps);
                    angles.turn(words);
                }
                write_head(words, head.target);
            }
        }
    };
    multiply_rows(&x_map, &w_map, sizes, items, COLUMNS, COLUMNS / 2, write);
}
