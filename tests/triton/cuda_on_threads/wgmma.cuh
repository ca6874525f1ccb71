// The copy engine's tiles and the tensor cores' products of kernels/cuda/include/hopper.cuh, on the
// threads of threads.hpp. Both operands of a product are rows of 128 bytes in the copy engine's
// pattern, of bfloat16. A product reads its operands when a thread waits for it, as late as it may.
#pragma once
#include "numbers.cuh"
#include "place.cuh"

#include <deque>
#include <initializer_list>

template <int COUNT>
inline void more_registers() {}
template <int COUNT>
inline void fewer_registers() {}

// ---- The copy engine ----

// Tiles of `box` rows and 128 bytes of each. Numbers have two bytes.
struct TileMap {
    const char* first;
    long rows, row_bytes, box;
};

inline u32 in_pattern(u32 address) { return address ^ (address >> 7 & 7) << 4; }

inline void load_tile_by(
    const TileMap* map, u32 target, u32 barrier, int column, int row, u64) {
    if (target % 1024) fail("a tile that is not aligned");
    Copies tile{{}, current->block, barrier, map->box * 128};
    for (int i = 0; i < map->box; i++)
        for (int piece = 0; piece < 128; piece += 16) {
            const long at = column * 2 + piece;
            const bool inside = row + i < map->rows && at < map->row_bytes;
            const char* source = inside ? map->first + (row + i) * map->row_bytes + at : nullptr;
            char* const to = current->block->memory + in_pattern(target + i * 128 + piece);
            tile.copies.push_back({to, source, 16});
        }
    on_their_way.push_back(std::move(tile));
}

// ---- Products of a warpgroup ----

struct Product {
    float* sum;
    u64 x, w;
    int columns, more;
};
// Of each thread, products in groups, of which the last one is open.
static std::map<Thread*, std::deque<std::vector<Product>>> products;
static std::map<std::pair<Block*, int>, std::vector<Thread*>> warpgroups;

template <class Kept>
inline void hold(Kept&) {}
inline void wgmma_fence() {
    if (products[current].empty()) products[current].emplace_back();
}
inline void wgmma_commit() { products[current].emplace_back(); }
// Descriptors count in units of 16 bytes.
inline u64 rows_of_128(u32 address) { return address >> 4; }

template <int COUNT>
inline void multiply(float (&sum)[COUNT], u64 x, u64 w, int more) {
    products[current].back().push_back({sum, x, w, 2 * COUNT, more});
}

inline float operand(u64 first, int row, int k) {
    return widened(shared<u16>(in_pattern((u32(first) << 4) + row * 128 + 2 * k)));
}

inline void compute(const std::vector<Thread*>& threads, size_t group, size_t i) {
    const Product& first = products[threads[0]][group][i];
    std::vector<float> left(64 * 16), right(first.columns * 16);
    for (int row = 0; row < 64; row++)
        for (int k = 0; k < 16; k++) left[row * 16 + k] = operand(first.x, row, k);
    for (int row = 0; row < first.columns; row++)
        for (int k = 0; k < 16; k++) right[row * 16 + k] = operand(first.w, row, k);
    for (Thread* thread : threads) {
        const Product& own = products[thread][group][i];
        if (own.x != first.x || own.w != first.w) fail("a warpgroup with two operands");
        const int index = thread->index.x % 128, lane = index % 32;
        for (int at = 0; at < first.columns / 2; at++) {
            const int row = index / 32 * 16 + lane / 4 + at % 4 / 2 * 8;
            const int column = at / 4 * 8 + lane % 4 * 2 + at % 2;
            float total = own.more ? own.sum[at] : 0.0f;
            for (int k = 0; k < 16; k++) total += left[row * 16 + k] * right[column * 16 + k];
            own.sum[at] = total;
        }
    }
}

template <int PENDING>
inline void wgmma_wait() {
    auto& here = warpgroups[{current->block, current->index.x / 128}];
    here.push_back(current);
    if (here.size() < 128) {
        sleep_here();
        return;
    }
    std::vector<Thread*> threads;
    threads.swap(here);
    // The open group is not counted.
    while (products[current].size() > PENDING + 1) {
        for (size_t i = 0; i < products[current].front().size(); i++) compute(threads, 0, i);
        for (Thread* thread : threads) products[thread].pop_front();
    }
    for (Thread* thread : threads)
        if (thread != current) ready.push_back(thread);
}
