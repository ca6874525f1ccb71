// Threads of a GPU on one thread of a CPU, in random order.
//
// A thread runs until it has to wait, and then any other one that can goes on. Copies to shared
// memory are done at any time after they were asked for. So what a kernel may not rely on does not
// hold here, and a kernel that waits for ever is found.
#pragma once
#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <vector>

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

struct Thread;
typedef std::vector<Thread*> Waiting;

// A barrier in shared memory. tx: bytes that are expected and not there.
struct MemoryBarrier {
    int arrivals = 0, pending = 0;
    long tx = 0;
    u32 phase = 0;
    Waiting waiting;
};

struct NamedBarrier {
    int count = 0;
    Waiting waiting;
};

// What the threads of a warp give one another. `operation`: what they do together.
struct Warp {
    int count = 0;
    const char* operation = nullptr;
    u32 given[32][10], taken[32][4];
    Waiting waiting;
};

struct Block {
    int index;
    char* memory;
    std::map<u32, MemoryBarrier> barriers;
    NamedBarrier named[16];
    Warp warps[32];
};

struct Copy {
    char* target;
    const void* source;
    int bytes;
};

// Copies that are asked for together, and the barrier that learns of them.
struct Copies {
    std::vector<Copy> copies;
    Block* block = nullptr;
    u32 barrier = 0;
    long tx = 0;
};

struct Index {
    int x;
};

struct Thread {
    void* stack_pointer;
    Index index;
    Block* block;
    u32 next_static;  // where its next variable in shared memory is
    Copies asked;
};

static Thread* current;
static Index number_of_blocks;
static std::vector<Thread*> ready;
static std::vector<Copies> on_their_way;
static std::mt19937 chance;
static void* scheduler;
static int alive, threads_of_block;
static long in_vain;
static bool failed;

extern "C" void switch_stacks(void** from, void* to);
asm(R"(
.text
switch_stacks:
    push %rbx; push %rbp; push %r12; push %r13; push %r14; push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15; pop %r14; pop %r13; pop %r12; pop %rbp; pop %rbx
    ret
)");

// Waits until somebody wakes the thread.
static void sleep_here() { switch_stacks(&current->stack_pointer, scheduler); }

// Ends the run. The thread does not go on, if it is one that found out.
static void fail(const char* why) {
    failed = true;
    fprintf(stderr, "%s\n", why);
    if (current == nullptr) return;
    fprintf(stderr, "in block %d, thread %d\n", current->block->index, current->index.x);
    sleep_here();
}

static void let_others_run() {
    ready.push_back(current);
    sleep_here();
}

// Lets others run, since what the thread looks for in memory is not there yet.
static void wait_in_vain() {
    if (++in_vain > 100'000'000) fail("waits for ever");
    let_others_run();
}

static void wake(Waiting& waiting) {
    ready.insert(ready.end(), waiting.begin(), waiting.end());
    waiting.clear();
}

// Calls compute(warp) when all threads of the warp are here.
template <class Compute>
static void as_warp(const char* operation, Compute compute) {
    Warp& warp = current->block->warps[current->index.x / 32];
    if (warp.count > 0 && strcmp(warp.operation, operation)) fail("the warp is apart");
    warp.operation = operation;
    if (++warp.count < 32) {
        warp.waiting.push_back(current);
        sleep_here();
        return;
    }
    compute(warp);
    warp.count = 0;
    wake(warp.waiting);
    if (chance() % 4 == 0) let_others_run();
}

// Takes a value from another thread of the warp.
static u32 from_lane(u32 value, int lane) {
    const int own = current->index.x % 32;
    Warp& warp = current->block->warps[current->index.x / 32];
    warp.given[own][0] = value, warp.given[own][1] = lane;
    as_warp("shuffle", [](Warp& warp) {
        for (int i = 0; i < 32; i++) warp.taken[i][0] = warp.given[warp.given[i][1]][0];
    });
    return warp.taken[own][0];
}

// ---- Barriers ----

static void settle(MemoryBarrier& barrier) {
    if (barrier.pending > 0 || barrier.tx != 0) return;
    barrier.phase++;
    barrier.pending = barrier.arrivals;
    wake(barrier.waiting);
}

static void arrive(Block* block, u32 place) {
    MemoryBarrier& barrier = block->barriers[place];
    if (barrier.pending == 0) return fail("more arrivals than the barrier has");
    barrier.pending--;
    settle(barrier);
}

// Counts `count` of `all` threads, and says whether they are complete.
static bool complete(NamedBarrier& barrier, int all) {
    if (++barrier.count < all) return false;
    barrier.count = 0;
    wake(barrier.waiting);
    return true;
}

// ---- Running ----

static void copy_some() {
    std::swap(on_their_way[chance() % on_their_way.size()], on_their_way.back());
    const Copies done = on_their_way.back();
    on_their_way.pop_back();
    for (const Copy& copy : done.copies)
        if (copy.source) memcpy(copy.target, copy.source, copy.bytes);
        else memset(copy.target, 0, copy.bytes);
    MemoryBarrier& barrier = done.block->barriers[done.barrier];
    barrier.tx -= done.tx;
    if (done.tx) settle(barrier);
    else arrive(done.block, done.barrier);
}

// Runs `entry` in all threads. dynamic: bytes of shared memory that a launch gives to a block. haste:
// how often of 100,000 times a copy is done though threads can run. Returns whether all threads
// ended, and nothing was wrong.
static bool run_threads(
    void (*entry)(), int blocks, int threads, int dynamic, int seed, int haste) {
    constexpr size_t STACK = 64 << 10, MEMORY = 227 << 10;
    const auto room = [](size_t bytes) {
        return static_cast<char*>(mmap(
            nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
            -1, 0));
    };
    char* const stacks = room(STACK * blocks * threads);
    char* const memory = room(MEMORY * blocks);
    memset(memory, 0xFF, MEMORY * blocks);
    std::vector<Block> all_blocks(blocks);
    std::vector<Thread> all(size_t(blocks) * threads);
    chance.seed(seed);
    ready.clear(), on_their_way.clear();
    number_of_blocks.x = blocks, alive = blocks * threads, threads_of_block = threads;
    in_vain = 0, failed = false;
    for (int i = 0; i < blocks * threads; i++) {
        Block& block = all_blocks[i / threads];
        block.index = i / threads, block.memory = memory + MEMORY * block.index;
        void** top = reinterpret_cast<void**>(stacks + STACK * (i + 1)) - 8;
        memset(top, 0, 64);
        top[6] = reinterpret_cast<void*>(entry);
        all[i] = {top, {i % threads}, &block, u32(dynamic), {}};
        ready.push_back(&all[i]);
    }
    while (alive > 0 && !failed) {
        current = nullptr;
        if (!on_their_way.empty() && (ready.empty() || int(chance() % 100000) < haste)) {
            copy_some();
            continue;
        }
        if (ready.empty()) break;
        // Mostly one of the last that became ready, which is in the cache still.
        const size_t among = chance() % 4 && ready.size() > 64 ? 64 : ready.size();
        std::swap(ready[ready.size() - 1 - chance() % among], ready.back());
        current = ready.back();
        ready.pop_back();
        switch_stacks(&scheduler, current->stack_pointer);
    }
    munmap(stacks, STACK * blocks * threads);
    munmap(memory, MEMORY * blocks);
    return alive == 0 && !failed && on_their_way.empty();
}
