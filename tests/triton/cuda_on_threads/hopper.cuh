// The functions of kernels/cuda/include/hopper.cuh, and CUDA's own, on the threads of threads.hpp.
#pragma once
#include "threads.hpp"

#include <cmath>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define threadIdx (current->index)
#define blockIdx (Index{current->block->index})
#define gridDim number_of_blocks

struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline int __popc(u32 word) { return __builtin_popcount(word); }

template <class To, class From>
inline To bits_as(From value) {
    To found;
    memcpy(&found, &value, sizeof found);
    return found;
}
inline u32 __float_as_uint(float value) { return bits_as<u32>(value); }
inline int __float_as_int(float value) { return bits_as<int>(value); }
inline float __uint_as_float(u32 bits) { return bits_as<float>(bits); }
inline float __int_as_float(int bits) { return bits_as<float>(bits); }
inline float __expf(float value) { return expf(value); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float rsqrtf(float value) { return 1.0f / sqrtf(value); }
inline u32 __funnelshift_r(u32 low, u32 high, int shift) {
    return u32((u64(high) << 32 | low) >> shift);
}
template <class Value>
inline Value __ldg(const Value* place) { return *place; }
inline int atomicAdd(int* place, int more) { return (*place += more) - more; }
inline u32 __byte_perm(u32 low, u32 high, u32 which) {
    const u64 both = u64(high) << 32 | low;
    u32 found = 0;
    for (int i = 0; i < 4; i++)
        found |= u32(both >> 8 * (which >> 4 * i & 7) & 255) << 8 * i;
    return found;
}

// ---- Warps ----

inline int own_lane() { return current->index.x % 32; }
inline void __syncwarp() {
    as_warp("sync", [](Warp&) {});
}
inline float __shfl_xor_sync(u32, float value, int mask) {
    return __uint_as_float(from_lane(__float_as_uint(value), own_lane() ^ mask));
}
inline float __shfl_down_sync(u32, float value, int apart) {
    const int lane = own_lane() + apart;
    return __uint_as_float(from_lane(__float_as_uint(value), lane < 32 ? lane : own_lane()));
}
inline int __shfl_sync(u32, int value, int lane) { return int(from_lane(value, lane)); }
inline u32 __ballot_sync(u32, bool own) {
    Warp& warp = current->block->warps[current->index.x / 32];
    const int lane = own_lane();
    warp.given[lane][0] = own;
    as_warp("ballot", [](Warp& warp) {
        u32 found = 0;
        for (int i = 0; i < 32; i++) found |= warp.given[i][0] << i;
        for (int i = 0; i < 32; i++) warp.taken[i][0] = found;
    });
    return warp.taken[lane][0];
}
inline bool __all_sync(u32 mask, bool own) { return __ballot_sync(mask, own) == ~0u; }
template <class Better>
inline int best_of_warp(const char* operation, int value, Better better) {
    Warp& warp = current->block->warps[current->index.x / 32];
    const int lane = own_lane();
    warp.given[lane][0] = value;
    as_warp(operation, [better](Warp& warp) {
        int best = warp.given[0][0];
        for (int i = 1; i < 32; i++) best = better(best, int(warp.given[i][0]));
        for (int i = 0; i < 32; i++) warp.taken[i][0] = best;
    });
    return warp.taken[lane][0];
}
inline int __reduce_max_sync(u32, int value) { return best_of_warp("max", value, max); }
inline int __reduce_min_sync(u32, int value) { return best_of_warp("min", value, min); }
inline u32 min(u32 a, u32 b) { return a < b ? a : b; }

// Adds the product of 16 rows and 16 columns of bfloat16, and eight columns, as mma.m16n8k16 does.
// The first column of each four alone is right: kernels use no other ones.
inline void multiply_tile(float (&sum)[4], const u32 (&rows)[4], u32 low, u32 high) {
    Warp& warp = current->block->warps[current->index.x / 32];
    const int lane = own_lane();
    for (int i = 0; i < 4; i++)
        warp.given[lane][i] = rows[i], warp.given[lane][6 + i] = __float_as_uint(sum[i]);
    warp.given[lane][4] = low, warp.given[lane][5] = high;
    as_warp("mma", [](Warp& warp) {
        float left[16][16], right[16][8];
        for (int lane = 0; lane < 32; lane++)
            for (int half = 0; half < 2; half++) {
                const auto number = [&](int i) {
                    return __uint_as_float(warp.given[lane][i] >> 16 * half << 16);
                };
                const int row = lane / 4, column = lane % 4 * 2 + half;
                left[row][column] = number(0), left[row + 8][column] = number(1);
                left[row][column + 8] = number(2), left[row + 8][column + 8] = number(3);
                right[column][row] = number(4), right[column + 8][row] = number(5);
            }
        for (int lane = 0; lane < 32; lane += 4)
            for (int i = 0; i < 4; i++) {
                float total = __uint_as_float(warp.given[lane][6 + i]);
                for (int k = 0; k < 16; k++)
                    total += left[lane / 4 + i / 2 * 8][k] * right[k][i % 2];
                warp.taken[lane][i] = __float_as_uint(total);
            }
    });
    for (int i = 0; i < 4; i++) sum[i] = __uint_as_float(warp.taken[lane][i]);
}

// ---- Barriers ----

inline void barrier_init(u32 place, u32 arrivals) {
    MemoryBarrier& barrier = current->block->barriers[place];
    barrier.arrivals = barrier.pending = arrivals;
}
inline void barrier_init_done() {}
inline void barrier_expect(u32 place, u32 bytes) {
    current->block->barriers[place].tx += bytes;
    arrive(current->block, place);
}
inline void barrier_arrive_here(u32 place) {
    arrive(current->block, place);
    if (chance() % 8 == 0) let_others_run();
}
inline void barrier_wait(u32 place, u32 phase) {
    MemoryBarrier& barrier = current->block->barriers[place];
    while ((barrier.phase & 1) == phase) {
        barrier.waiting.push_back(current);
        sleep_here();
    }
}
template <int THREADS>
inline void named_arrive(int barrier) {
    complete(current->block->named[barrier], THREADS);
}
inline void sync(int barrier, int threads) {
    NamedBarrier& named = current->block->named[barrier];
    if (complete(named, threads)) return;
    named.waiting.push_back(current);
    sleep_here();
}
template <int THREADS>
inline void named_sync(int barrier) {
    sync(barrier, THREADS);
}
inline void __syncthreads() { sync(0, threads_of_block); }

// ---- Shared memory ----

inline u32 shared_address(const void* place) {
    return u32(static_cast<const char*>(place) - current->block->memory);
}
template <class Value>
inline Value shared(u32 address) {
    if (address % sizeof(Value)) fail("a read that is not aligned");
    Value found;
    memcpy(&found, current->block->memory + address, sizeof found);
    return found;
}
inline uint4 four_words(u32 address) { return shared<uint4>(address); }
inline u32 word_of(const uint4& words, int i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}
inline float number(u32 address) { return shared<float>(address); }
inline u32 word(u32 address) { return shared<u32>(address); }
inline u32 half_word(u32 address) { return shared<u16>(address); }
inline void write_word(u32 address, u32 value) {
    memcpy(current->block->memory + address, &value, sizeof value);
}
inline void write_number(u32 address, float value) {
    memcpy(current->block->memory + address, &value, sizeof value);
}
// Returns a thread's next variable in shared memory: that of all threads of the block.
template <class Value, int COUNT>
inline Value (&static_variable())[COUNT] {
    current->next_static = (current->next_static + 15) / 16 * 16;
    char* const place = current->block->memory + current->next_static;
    current->next_static += COUNT * sizeof(Value);
    if (current->next_static > 227 << 10) fail("more shared memory than there is");
    return *reinterpret_cast<Value(*)[COUNT]>(place);
}

// ---- Copies ----

inline u64 read_once() { return 0; }
inline void check_copy(u32 target, const void* source, u32 bytes) {
    if ((target | u64(source) | bytes) % 16) fail("a copy that is not aligned");
}
inline void load_bytes_by(u32 target, const void* source, u32 bytes, u32 barrier, u64) {
    check_copy(target, source, bytes);
    char* const to = current->block->memory + target;
    on_their_way.push_back({{{to, source, int(bytes)}}, current->block, barrier, long(bytes)});
}
inline void copy_16(u32 target, const void* source, int bytes) {
    check_copy(target, source, 16);
    char* const to = current->block->memory + target;
    current->asked.copies.push_back({to, bytes ? source : nullptr, 16});
}
inline void copy_16_by(u32 target, const void* source, int bytes, u64) {
    copy_16(target, source, bytes);
}
inline void copy_4(u32 target, const void* source) {
    current->asked.copies.push_back({current->block->memory + target, source, 4});
}
inline void arrive_when_copied(u32 barrier) {
    current->asked.block = current->block, current->asked.barrier = barrier;
    on_their_way.push_back(std::move(current->asked));
    current->asked = {};
}
inline void shared_memory_fence() {}
inline void wait_for_kernels_before() {}
inline void let_next_kernel_start() {}
