// Both products of experts for some pairs of a token and an expert, sorted by expert, where reading
// the experts' matrices takes the time.
//
// Blocks take item after item from a counter: PAIRS of an expert, and 128 rows of gate and of up,
// or of down. The items of down follow all those of gate and up. Matrices do not depend on anything
// that is computed here, so the memory never rests between the products: only the inputs of down
// wait until the inner values of their pairs are complete. All blocks run at once, and whoever waits
// waits for items that others have taken before.
//
// One warp loads matrices by the copy engine, in units of 64 rows and 256 bytes of each, into a
// ring. Two warps copy the inputs of the pairs into another one, 256 bytes of each. Two warpgroups
// multiply in turn, an item each, so one writes its results while the other goes on. The matrix is
// the first operand of the tensor cores, so there may be few pairs.
//
// With AHEAD, blocks start while the pairs are still being sorted, and fill their rings as if the
// first experts had a tile each, which they mostly have. A block whose first item is another one
// drops these units. To start then, it leaves registers and shared memory to the kernels before it.
//
// The compiler is given: HALF (0: bfloat16, 1: float16), GELU, CLAMPED with ALPHA and LIMIT,
// WITH_BIAS, CHOSEN (experts of a token), PAIRS (of a tile), AHEAD, W_STAGES, X_STAGES.
#define GATED 1
#define ROW_SCALES 0
#include "expert_results.cuh"
#include "wgmma.cuh"

// Rows of an item and of a unit, and units of a step of gate and up.
constexpr int ROWS = 128, UNIT_ROWS = 64, UNITS = 2 * ROWS / UNIT_ROWS;
// Columns of a step, which are two boxes of 128 bytes a row.
constexpr int STEP = 128, BOX = 64, BOX_BYTES = 128;
constexpr int W_BOX = UNIT_ROWS * BOX_BYTES, X_BOX = PAIRS * BOX_BYTES;
constexpr int W_BYTES = 2 * W_BOX, X_BYTES = 2 * X_BOX;
// Sums of a thread, of 64 rows of a matrix.
constexpr int SUMS = PAIRS / 2;
// Warps that multiply, and that copy; items that are known ahead.
constexpr int MULTIPLYING = 8, COPYING = 2, QUEUE = 4;
// The threads of a block, and those for which the compiler shares out a processor's registers.
constexpr int THREADS = 384, THREADS_WITH_ROOM = AHEAD ? 512 : THREADS;
// Registers of a thread that loads, and of one that multiplies.
constexpr int LOADING_REGISTERS = 40, MULTIPLYING_REGISTERS = AHEAD ? 168 : 232;
// What blocks do in place of an item, to drop what they have loaded ahead.
constexpr int DROP = -1;
// Threads that copy inputs. Eight copy a box's bytes of a row, and each has some of the rows.
constexpr int COPIERS = 32 * COPYING, BESIDE = COPIERS / 8, EACH = PAIRS / BESIDE;

struct Sizes {
    // Pairs; numbers of a row of x, and of inner values; experts.
    int pairs, width, inner_width, experts;
};

struct Operands {
    const u16 *x, *gate_up_bias, *down_bias;
    // The pairs' order, the expert of each tile, and the number of tiles.
    const int *order, *experts, *used;
    // The next item, and then for each tile how many parts of its inner values are written.
    int* progress;
    u16 *inner, *results;
};

// What a block works on: a tile, and the first of 128 columns of inner values, or of results.
struct Item {
    bool is_down;
    int tile, column;
};

__device__ __forceinline__ int gate_parts_of(const Sizes& sizes) {
    return (sizes.inner_width + ROWS - 1) / ROWS;
}

struct Work {
    int gate_parts, down_parts, gate_items, items;

    __device__ __forceinline__ Work(const Sizes& sizes, int used) {
        gate_parts = gate_parts_of(sizes);
        down_parts = (sizes.width + ROWS - 1) / ROWS;
        gate_items = used * gate_parts, items = gate_items + used * down_parts;
    }

    __device__ __forceinline__ Item item(int index) const {
        const bool is_down = index >= gate_items;
        const int at = is_down ? index - gate_items : index, parts = is_down ? down_parts : gate_parts;
        return {is_down, at / parts, at % parts * ROWS};
    }
};

__device__ __forceinline__ int steps_of(int numbers) { return (numbers + STEP - 1) / STEP; }

// The rings of a block, their barriers, and where a thread stands in them.
struct Rings {
    u32 w, x, w_full, w_empty, x_full, x_empty, items_full, items_empty;
    int* items;
    Place<W_STAGES> w_at;
    Place<X_STAGES> x_at;
    Place<QUEUE> item_at;

    __device__ __forceinline__ Rings(char* memory, u64* barriers, int* queue) {
        w = shared_address(memory), x = w + W_STAGES * W_BYTES;
        w_full = shared_address(barriers), w_empty = w_full + 8 * W_STAGES;
        x_full = w_empty + 8 * W_STAGES, x_empty = x_full + 8 * X_STAGES;
        items_full = x_empty + 8 * X_STAGES, items_empty = items_full + 8 * QUEUE;
        items = queue;
    }

    __device__ __forceinline__ void init() {
        for (int slot = 0; slot < W_STAGES; slot++) {
            barrier_init(w_full + 8 * slot, 1);
            barrier_init(w_empty + 8 * slot, MULTIPLYING / 2);
        }
        for (int slot = 0; slot < X_STAGES; slot++) {
            barrier_init(x_full + 8 * slot, COPIERS);
            barrier_init(x_empty + 8 * slot, MULTIPLYING / 2);
        }
        for (int slot = 0; slot < QUEUE; slot++) {
            barrier_init(items_full + 8 * slot, 1);
            barrier_init(items_empty + 8 * slot, MULTIPLYING + COPYING);
        }
        barrier_init_done();
    }

    // Tells all others what comes next.
    __device__ __forceinline__ void push(int index) {
        barrier_wait(items_empty + 8 * item_at.slot, item_at.phase ^ 1);
        *const_cast<volatile int*>(items + item_at.slot) = index;
        barrier_arrive_here(items_full + 8 * item_at.slot);
        item_at.next();
    }

    // Returns what comes next, for all threads of a warp.
    __device__ __forceinline__ int pop() {
        barrier_wait(items_full + 8 * item_at.slot, item_at.phase);
        const int index = *const_cast<volatile int*>(items + item_at.slot);
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive_here(items_empty + 8 * item_at.slot);
        item_at.next();
        return index;
    }

    __device__ __forceinline__ void load_w(const TileMap* map, int step, int row, u64 once) {
        const u32 full = w_full + 8 * w_at.slot;
        barrier_wait(w_empty + 8 * w_at.slot, w_at.phase ^ 1);
        barrier_expect(full, W_BYTES);
        const u32 target = w + w_at.slot * W_BYTES;
        load_tile_by(map, target, full, step * STEP, row, once);
        load_tile_by(map, target + W_BOX, full, step * STEP + BOX, row, once);
        w_at.next();
    }

    // Loads the units of gate and of up of a step, from these rows of a gate on.
    __device__ __forceinline__ void load_gate_and_up(
        const TileMap* map, int step, int row, const Sizes& sizes, u64 once) {
        for (int first : {row, row + sizes.inner_width}) {
            load_w(map, step, first, once);
            load_w(map, step, first + UNIT_ROWS, once);
        }
    }

    // Goes over units that nobody multiplies.
    __device__ __forceinline__ void drop(int units) {
        for (int i = 0; i < units; i++) {
            barrier_wait(w_full + 8 * w_at.slot, w_at.phase);
            __syncwarp();
            if (threadIdx.x % 32 == 0) barrier_arrive_here(w_empty + 8 * w_at.slot);
            w_at.next();
        }
    }

    // Waits for inputs, which threads copied and the tensor cores read. Returns where they are.
    __device__ __forceinline__ u32 wait_x() {
        barrier_wait(x_full + 8 * x_at.slot, x_at.phase);
        shared_memory_fence();
        return x + x_at.slot * X_BYTES;
    }

    __device__ __forceinline__ void release_x() {
        if (threadIdx.x % 32 == 0) barrier_arrive_here(x_empty + 8 * x_at.slot);
        x_at.next();
    }

    // Goes over an item of the other warpgroup.
    __device__ __forceinline__ void pass(const Item& item, const Sizes& sizes) {
        const int steps = steps_of(item.is_down ? sizes.inner_width : sizes.width);
        x_at.skip(steps), w_at.skip((item.is_down ? UNITS / 2 : UNITS) * steps);
    }

    // Adds the products of the next two units and inputs to the sums of each.
    __device__ __forceinline__ void add(float (&sum)[2][SUMS], u32 inputs, bool more) {
        add_unit(sum[0], inputs, more), add_unit(sum[1], inputs, more);
    }

    __device__ __forceinline__ void add_unit(float (&sum)[SUMS], u32 inputs, bool more) {
        barrier_wait(w_full + 8 * w_at.slot, w_at.phase);
        const u64 matrix = rows_of_128(w + w_at.slot * W_BYTES), pairs = rows_of_128(inputs);
        hold(sum);
        wgmma_fence();
#pragma unroll
        for (int box = 0; box < 2; box++)
#pragma unroll
            for (int k = 0; k < 4; k++)
                multiply(
                    sum, matrix + box * (W_BOX >> 4) + 2 * k, pairs + box * (X_BOX >> 4) + 2 * k,
                    more || box > 0 || k > 0);
        wgmma_commit();
        wgmma_wait<0>();
        hold(sum);
        if (threadIdx.x % 32 == 0) barrier_arrive_here(w_empty + 8 * w_at.slot);
        w_at.next();
    }
};

// ---- The warp that loads matrices ----

// Steps of the first item that are loaded ahead.
__device__ __forceinline__ int steps_ahead(const Sizes& sizes) {
    return AHEAD ? min(W_STAGES / UNITS, steps_of(sizes.width)) : 0;
}

__device__ __forceinline__ void load_matrices(
    Rings& rings, const TileMap* gate_up, const TileMap* down, const Operands& given,
    const Sizes& sizes) {
    const u64 once = read_once();
    int index = blockIdx.x;
    const int parts = gate_parts_of(sizes), guess = index / parts;
    int ahead = guess < sizes.experts ? steps_ahead(sizes) : 0;
    for (int step = 0; step < ahead; step++)
        rings.load_gate_and_up(
            gate_up, step, 2 * guess * sizes.inner_width + index % parts * ROWS, sizes, once);
    wait_for_kernels_before();
    const Work work(sizes, *given.used);
    if (ahead && (index >= work.gate_items || given.experts[guess] != guess)) {
        rings.push(DROP);
        ahead = 0;
    }
    while (index < work.items) {
        rings.push(index);
        const int later = gridDim.x + atomicAdd(given.progress, 1);
        const Item item = work.item(index);
        const int expert = given.experts[item.tile];
        if (item.is_down) {
            const int row = expert * sizes.width + item.column;
            for (int step = 0; step < steps_of(sizes.inner_width); step++) {
                rings.load_w(down, step, row, once);
                rings.load_w(down, step, row + UNIT_ROWS, once);
            }
        } else {
            const int row = 2 * expert * sizes.inner_width + item.column;
            for (int step = ahead; step < steps_of(sizes.width); step++)
                rings.load_gate_and_up(gate_up, step, row, sizes, once);
        }
        index = later, ahead = 0;
    }
    rings.push(work.items);
}

// ---- The warps that copy inputs ----

__device__ __forceinline__ int acquired(const int* place) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(place) : "memory");
    return value;
}

__device__ __forceinline__ void copy_inputs(
    Rings& rings, const Operands& given, const Sizes& sizes) {
    wait_for_kernels_before();
    const Work work(sizes, *given.used);
    const int thread = threadIdx.x % COPIERS, piece = thread % 8, first = thread / 8;
    const u32 place = first * BOX_BYTES + ((piece ^ first) << 4);
    for (int index = rings.pop(); index < work.items; index = rings.pop()) {
        if (index == DROP) continue;
        const Item item = work.item(index);
        const int width = item.is_down ? sizes.inner_width : sizes.width;
        const u16* source[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int at = item.tile * PAIRS + first + i * BESIDE, pair = given.order[at];
            const u16* row = item.is_down ? given.inner + u64(at) * width
                                          : given.x + u64(pair / CHOSEN) * width;
            // What is not a pair is not copied, and what becomes of it is not written.
            source[i] = pair < sizes.pairs ? row : nullptr;
        }
        if (item.is_down) {
            if (thread == 0)
                while (acquired(given.progress + 1 + item.tile) < work.gate_parts) {}
            named_sync<COPIERS>(3);
        }
        for (int step = 0; step < steps_of(width); step++) {
            const int slot = rings.x_at.slot;
            barrier_wait(rings.x_empty + 8 * slot, rings.x_at.phase ^ 1);
#pragma unroll
            for (int box = 0; box < 2; box++) {
                const u32 target = rings.x + slot * X_BYTES + box * X_BOX + place;
                const int column = step * STEP + box * BOX + piece * 8;
#pragma unroll
                for (int i = 0; i < EACH; i++)
                    if (source[i])
                        copy_16(
                            target + i * BESIDE * BOX_BYTES,
                            source[i] + (column < width ? column : 0), column < width ? 16 : 0);
            }
            arrive_when_copied(rings.x_full + 8 * slot);
            rings.x_at.next();
        }
    }
}

// ---- The warps that multiply ----

// Adds one to a counter, and lets its readers see what this warpgroup has written.
__device__ __forceinline__ void tell(int* place) {
    if (threadIdx.x < 128) named_sync<128>(1);
    else named_sync<128>(2);
    if (threadIdx.x % 128 == 0)
        asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(place) : "memory");
}

// Returns the biases of an expert, or null if there are none.
__device__ __forceinline__ const u16* biases(const u16* all, const int* expert, int outputs) {
    return WITH_BIAS && all ? all + u64(*expert) * outputs : nullptr;
}

__device__ __forceinline__ float biased(float sum, const u16* bias, int at) {
    return WITH_BIAS && bias ? sum + widened(bias[at]) : sum;
}

// A thread has sums of two rows, which are columns of the results, 8 apart: of pairs 8 j + 2 quad and
// the next one at 4 j, of the second row at 4 j + 2. This returns four neighbouring columns of the
// pair 8 j + lane / 4. result(i, high): the result of sum i, which is of the second row if `high`.
template <class Result>
__device__ __forceinline__ uint2 columns_of_pair(int j, Result result) {
    const u32 low = packed(result(4 * j, false), result(4 * j + 1, false));
    const u32 high = packed(result(4 * j + 2, true), result(4 * j + 3, true));
    return four_columns(transposed(low), transposed(high));
}

// Barriers know whether a slot is used for an odd time, and no more. So a warpgroup waits for units
// only after the other one has had all before them.
__device__ __forceinline__ void wait_for_turn() {
    if (threadIdx.x < 128) named_sync<256>(4);
    else named_sync<256>(5);
}

__device__ __forceinline__ void let_other_multiply() {
    if (threadIdx.x < 128) named_arrive<256>(5);
    else named_arrive<256>(4);
}

__device__ __forceinline__ void multiply_item(
    Rings& rings, const Item& item, const Operands& given, const Sizes& sizes) {
    const int lane = threadIdx.x % 32, quad = lane % 4;
    // The first row of this warp, and the first column that a thread writes, from there on.
    const int first = item.column + threadIdx.x / 32 % 4 * 16, own = 8 * (quad / 2) + 4 * (quad & 1);
    const int outputs = item.is_down ? sizes.width : sizes.inner_width;
    const int* order = given.order + item.tile * PAIRS;
    // Groups of eight that have a pair: what fills a tile up follows its pairs.
    int groups = 0;
#pragma unroll
    for (int j = 0; j < PAIRS / 8; j++) groups += order[8 * j] < sizes.pairs;
    float sum[2][SUMS];
    if (item.is_down) {
        int pairs[PAIRS / 8];
#pragma unroll
        for (int j = 0; j < PAIRS / 8; j++) pairs[j] = order[8 * j + lane / 4];
        wait_for_turn();
        for (int step = 0; step < steps_of(sizes.inner_width); step++) {
            rings.add(sum, rings.wait_x(), step > 0);
            rings.release_x();
        }
        let_other_multiply();
        const u16* bias = biases(given.down_bias, given.experts + item.tile, outputs);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = first + 64 * half + lane / 4, column = first + 64 * half + own;
            const int rows[2] = {min(row, outputs - 1), min(row + 8, outputs - 1)};
#pragma unroll
            for (int j = 0; j < PAIRS / 8; j++) {
                if (j >= groups) break;
                const uint2 four = columns_of_pair(
                    j, [&](int i, bool high) { return biased(sum[half][i], bias, rows[high]); });
                if (pairs[j] < sizes.pairs && column < outputs)
                    *reinterpret_cast<uint2*>(given.results + u64(pairs[j]) * outputs + column) =
                        four;
            }
        }
        return;
    }
    float up[2][SUMS];
    wait_for_turn();
    for (int step = 0; step < steps_of(sizes.width); step++) {
        const u32 inputs = rings.wait_x();
        rings.add(sum, inputs, step > 0);
        rings.add(up, inputs, step > 0);
        rings.release_x();
    }
    let_other_multiply();
    const u16* bias = biases(given.gate_up_bias, given.experts + item.tile, 2 * outputs);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = first + 64 * half + lane / 4, column = first + 64 * half + own;
        const int rows[2] = {min(row, outputs - 1), min(row + 8, outputs - 1)};
        u16* target = given.inner + u64(item.tile * PAIRS + lane / 4) * outputs + column;
#pragma unroll
        for (int j = 0; j < PAIRS / 8; j++) {
            if (j >= groups) break;
            const uint2 four = columns_of_pair(j, [&](int i, bool high) {
                return activated(
                    biased(sum[half][i], bias, rows[high]),
                    biased(up[half][i], bias, outputs + rows[high]));
            });
            if (column < outputs) *reinterpret_cast<uint2*>(target + u64(8 * j) * outputs) = four;
        }
    }
    tell(given.progress + 1 + item.tile);
}

// Multiplies every second item, and goes over those of the other warpgroup.
__device__ __forceinline__ void multiply_items(
    Rings& rings, const Operands& given, const Sizes& sizes) {
    wait_for_kernels_before();
    let_next_kernel_start();
    const Work work(sizes, *given.used);
    bool own = threadIdx.x < 128;
    if (!own) let_other_multiply();
    for (int index = rings.pop(); index < work.items; index = rings.pop(), own = !own) {
        if (index == DROP) {
            const int units = UNITS * steps_ahead(sizes);
            if (own) wait_for_turn(), rings.drop(units), let_other_multiply();
            else rings.w_at.skip(units);
            continue;
        }
        const Item item = work.item(index);
        if (own) multiply_item(rings, item, given, sizes);
        else rings.pass(item, sizes);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS_WITH_ROOM, 1) expert_stream(
    const __grid_constant__ TileMap gate_up, const __grid_constant__ TileMap down,
    const __grid_constant__ Operands given, const __grid_constant__ Sizes sizes) {
    extern __shared__ __align__(1024) char memory[];
    __shared__ __align__(8) u64 barriers[2 * (W_STAGES + X_STAGES + QUEUE)];
    __shared__ int queue[QUEUE];
    Rings rings(memory, barriers, queue);
    if (threadIdx.x == 0) rings.init();
    __syncthreads();
    const int warp = threadIdx.x / 32;
    if (warp < MULTIPLYING) {
        more_registers<MULTIPLYING_REGISTERS>();
        multiply_items(rings, given, sizes);
    } else {
        fewer_registers<LOADING_REGISTERS>();
        if (warp < MULTIPLYING + COPYING) copy_inputs(rings, given, sizes);
        else if (warp == MULTIPLYING + COPYING && threadIdx.x % 32 == 0)
            load_matrices(rings, &gate_up, &down, given, sizes);
    }
}
