// What Hopper's instructions look like from C++: barriers in shared memory, the copy engine,
// clusters, and products of a warpgroup. Names and operands are those of NVIDIA's PTX reference.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#include "place.cuh"

// A descriptor of tiles for the copy engine (CUtensorMap in the driver's reference).
struct alignas(64) TileMap {
    char bytes[128];
};

__device__ __forceinline__ u32 shared_address(const void* place) {
    return static_cast<u32>(__cvta_generic_to_shared(place));
}

// ---- Barriers ----

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// Lets other processors of the cluster and the copy engine see the barriers that were made.
__device__ __forceinline__ void barrier_init_done() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
        : "memory");
}

__device__ __forceinline__ void barrier_arrive_here(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at the barrier that lies at the same place in another processor of the cluster.
__device__ __forceinline__ void barrier_arrive(u32 barrier, u32 rank) {
    asm volatile(
        "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;"
        " mbarrier.arrive.shared::cluster.b64 _, [remote]; }" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 phase) {
    asm volatile(
        "{ .reg .pred done;"
        " again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;"
        " @!done bra again; }" ::"r"(barrier),
        "r"(phase)
        : "memory");
}

// Waits for as many threads that come here.
template <int THREADS>
__device__ __forceinline__ void named_sync(int barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}

// Counts as threads that came there, and does not wait.
template <int THREADS>
__device__ __forceinline__ void named_arrive(int barrier) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}

// ---- Shared memory ----

__device__ __forceinline__ uint4 four_words(u32 address) {
    uint4 found;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w)
                 : "r"(address));
    return found;
}

__device__ __forceinline__ u32 word_of(const uint4& words, int i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

__device__ __forceinline__ float number(u32 address) {
    float found;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(found) : "r"(address));
    return found;
}

__device__ __forceinline__ u32 word(u32 address) {
    u32 found;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(found) : "r"(address));
    return found;
}

__device__ __forceinline__ u32 half_word(u32 address) {
    u16 found;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(found) : "r"(address));
    return found;
}

__device__ __forceinline__ void write_number(u32 address, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

__device__ __forceinline__ void write_word(u32 address, u32 value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void zero_16(u32 address) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}

// ---- Clusters ----

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// ---- The copy engine ----

// Loads a tile that begins at this column and row into the processors of `mask`.
template <bool MANY>
__device__ __forceinline__ void load_tile(
    const TileMap* map, u32 target, u32 barrier, int column, int row, u16 mask) {
    if (MANY) {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
            ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(target),
            "l"(map), "r"(barrier), "r"(column), "r"(row), "h"(mask)
            : "memory");
    } else {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
            " [%0], [%1, {%3, %4}], [%2];" ::"r"(target),
            "l"(map), "r"(barrier), "r"(column), "r"(row)
            : "memory");
    }
}

// Returns the policy of L2 for lines that are read once, which it gives up before others.
__device__ __forceinline__ u64 read_once() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Loads a tile that begins at this column and row, by a policy of L2.
__device__ __forceinline__ void load_tile_by(
    const TileMap* map, u32 target, u32 barrier, int column, int row, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(target),
        "l"(map), "r"(barrier), "r"(column), "r"(row), "l"(policy)
        : "memory");
}

// Loads a box of three dimensions. What is outside of the memory becomes zero.
__device__ __forceinline__ void load_box(
    const TileMap* map, u32 target, u32 barrier, int column, int row, int plane) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(target),
        "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(plane)
        : "memory");
}

// Loads bytes that lie together, a multiple of 16.
__device__ __forceinline__ void load_bytes(u32 target, const void* source, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            target),
        "l"(source), "r"(bytes), "r"(barrier)
        : "memory");
}

// Loads bytes that lie together, by a policy of L2.
__device__ __forceinline__ void load_bytes_by(
    u32 target, const void* source, u32 bytes, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1], %2, [%3], %4;" ::"r"(target),
        "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

// Copies 16 bytes, or zeros where `bytes` is 0.
__device__ __forceinline__ void copy_16(u32 target, const void* source, int bytes) {
    asm volatile(
        "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(bytes)
        : "memory");
}

// Copies 16 bytes, or zeros where `bytes` is 0, by a policy of L2.
__device__ __forceinline__ void copy_16_by(
    u32 target, const void* source, int bytes, u64 policy) {
    asm volatile(
        "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(target),
        "l"(source), "r"(bytes), "l"(policy)
        : "memory");
}

__device__ __forceinline__ void copy_4(u32 target, const void* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target), "l"(source) : "memory");
}

// Arrives at a barrier when the copies of this thread are done.
__device__ __forceinline__ void arrive_when_copied(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Lets the tensor cores see what threads wrote to shared memory.
__device__ __forceinline__ void shared_memory_fence() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- Products of a warpgroup ----

// Keeps the compiler from moving the sums over this place.
template <int COUNT>
__device__ __forceinline__ void hold(float (&sum)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(sum[i])::"memory");
}

// Keeps the compiler from computing an operand's words behind this place.
template <int COUNT>
__device__ __forceinline__ void hold(u32 (&words)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+r"(words[i])::"memory");
}

__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Returns the descriptor of rows of 128 bytes in the copy engine's pattern for 128 bytes.
__device__ __forceinline__ u64 rows_of_128(u32 address) {
    return u64((address & 0x3FFFF) >> 4) | (u64(1) << 16) | (u64(64) << 32) | (u64(1) << 62);
}

// Returns the descriptor of a second operand of which a row has the columns of one input: 64 of them
// in 128 bytes, in the copy engine's pattern, and `apart` bytes behind these rows the next 64.
__device__ __forceinline__ u64 columns_of_128(u32 address, u32 apart) {
    return u64((address & 0x3FFFF) >> 4) | (u64(apart >> 4) << 16) | (u64(64) << 32) |
        (u64(1) << 62);
}

template <int COUNT>
__device__ __forceinline__ void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ __forceinline__ void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ---- Kernels that follow one another (programmatic dependent launch) ----

__device__ __forceinline__ void wait_for_kernels_before() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void let_next_kernel_start() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
