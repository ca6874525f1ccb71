/* Attention over the paged cache (Kwon et al. 2023), for all tokens of a step on a CPU.

A query reads the blocks of its row where they lie, one after the other, with a running softmax
(Milakov and Gimelshein 2018). A score adds its products in the order of the dimensions, and a
result those of its keys in the order of their places. Queries of one row and KV head share what
they load, up to QUERIES of them, and each does what it would do alone. So the bits of a result
depend on the query's own position and inputs alone: not on other rows, on how a prompt was cut into
chunks, or on the number of threads.

A head's keys lie in a block by dimensions, so that a vector has one number of several keys, and its
values lie by tokens. All sums are float. */

#include <omp.h>

#include "numbers.h"
#include "vectors.h"

/* MOST_DIM and MOST_BLOCK stand in native_backend.py too, which refuses more. */
enum { MOST_DIM = 512, MOST_BLOCK = 256, MOST_QUERIES = 32, QUERIES = 8, SHARED = 4, LINE = 64 };

/* What a layer has at every step. The order and the types are those of native_backend.py. */
typedef struct {
    number *cache;        /* [blocks, kv_heads, keys [dim, block_size], values [block_size, dim]] */
    int64_t block_stride; /* in numbers */
    int32_t block_size, heads, kv_heads, dim;
    int32_t window;       /* tokens that a query sees, 0 for all */
    int32_t reads_only;   /* whether qkv has queries alone: keys and values are another layer's */
    float scale, softcap; /* softcap: 0 for none */
    const float *cos, *sin; /* [positions, dim / 2] */
    float eps;            /* of the norms of heads */
    int32_t norms_wide;   /* whether the norms' weights are float */
} Layer;

/* What the layers of a cache group have in common at one step. */
typedef struct {
    int64_t tokens;
    const int64_t *positions; /* [tokens] */
    const int64_t *slots;     /* [tokens] block id * block size + offset */
    const int32_t *rows;      /* [tokens] index of the row's block table */
    const int32_t *tables;    /* [rows, table_stride] */
    int64_t table_stride;
    int32_t apart; /* whether each token is of another row */
} Step;

/* The arguments of `attend`. */
typedef struct {
    const Layer *layer;
    const Step *step;
    number *qkv;        /* [tokens, (heads + 2 kv_heads) * dim], `row_stride` numbers apart */
    int64_t row_stride;
    const void *query_norm, *key_norm; /* [dim], or null */
    const float *sinks; /* [heads], or null */
    number *out;        /* [tokens, heads * dim] */
} Attend;

/* Return where a head's keys are in a block. */
static inline number *head_of(const Layer *layer, int64_t block, int64_t head) {
    return layer->cache + block * layer->block_stride + head * 2 * layer->dim * layer->block_size;
}

/* Norm a head, if weights are given, and rotate it, in place. */
static void turn(const Layer *layer, number *head, int64_t position, const void *weight) {
    int half = layer->dim / 2;
    const float *cos = layer->cos + position * half, *sin = layer->sin + position * half;
    if (weight) norm(head, weight, layer->norms_wide, layer->dim, layer->eps, head);
    for (int i = 0; i < half; i++) {
        float x = wide(head[i]), y = wide(head[half + i]);
        head[i] = narrow(x * cos[i] - y * sin[i]);
        head[half + i] = narrow(y * cos[i] + x * sin[i]);
    }
}

/* Turn the queries and the key of one KV head of a token, and write key and value to the cache. */
static void write_head(
    const Layer *layer, const Step *step, number *row, int64_t token, int head,
    const void *query_norm, const void *key_norm
) {
    int dim = layer->dim, group = layer->heads / layer->kv_heads;
    int64_t position = step->positions[token], slot = step->slots[token];
    for (int i = 0; i < group; i++)
        turn(layer, row + (head * group + i) * dim, position, query_norm);
    if (layer->reads_only) return;
    number *key = row + (layer->heads + head) * dim, *value = key + layer->kv_heads * dim;
    turn(layer, key, position, key_norm);
    int64_t size = layer->block_size, place = slot % size;
    number *keys = head_of(layer, slot / size, head), *values = keys + dim * size;
    for (int i = 0; i < dim; i++) {
        keys[i * size + place] = key[i];
        values[place * dim + i] = value[i];
    }
}

/* A query, as it reads block after block. */
typedef struct {
    int64_t begin, length; /* the keys that it sees, up to `length` */
    int head, key_head;
    float top, mass;       /* the largest score so far, and the sum of all weights relative to it */
    number *out;
} Query;

/* The queries that one thread computes together. Their numbers are [count, dim]. */
typedef struct {
    int count;
    Query of[MOST_QUERIES];
    float numbers[MOST_QUERIES * MOST_DIM], sums[MOST_QUERIES * MOST_DIM];
} Queries;

typedef float Scores[MOST_BLOCK + LANES];

/* Write the products of `count` queries with the keys of a block. A vector that goes on behind the
   block has numbers there that mean nothing. next: keys that come later, with values behind them. */
static inline __attribute__((always_inline)) void score(
    const Layer *layer, const float *queries, const number *keys, const number *next,
    const int count, const int dim, Scores *scores
) {
    int64_t size = layer->block_size;
    for (int64_t i = 0; i < 2 * dim * size; i += LINE / sizeof(number)) __builtin_prefetch(next + i);
    for (int64_t k = 0; k < size; k += LANES) {
        floats sums[QUERIES];
        for (int t = 0; t < count; t++) sums[t] = (floats){0};
        for (int i = 0; i < dim; i++) {
            floats key = load_wide(keys + i * size + k);
            for (int t = 0; t < count; t++) sums[t] += queries[t * dim + i] * key;
        }
        for (int t = 0; t < count; t++) store_floats(scores[t] + k, sums[t]);
    }
}

/* Turn a query's scores with the keys [from, to) of a block into weights. Return what the sum of
   the values so far is to be multiplied with. */
static __attribute__((noinline)) float soften(
    const Layer *layer, float *scores, int from, int to, Query *query
) {
    int padded = (layer->block_size + LANES - 1) / LANES * LANES;
    for (int k = 0; k < padded; k++) scores[k] *= layer->scale;
    if (layer->softcap > 0)
        for (int k = from; k < to; k++)
            scores[k] = tanhf(scores[k] / layer->softcap) * layer->softcap;
    for (int k = 0; k < from; k++) scores[k] = -INFINITY;
    for (int k = to; k < padded; k++) scores[k] = -INFINITY;
    float top = query->top, mass = 0;
#pragma omp simd reduction(max : top)
    for (int k = 0; k < padded; k++) top = scores[k] > top ? scores[k] : top;
#pragma omp simd reduction(+ : mass)
    for (int k = 0; k < padded; k++) {
        scores[k] = power(scores[k] - top);
        mass += scores[k];
    }
    float fade = power(query->top - top);
    query->top = top, query->mass = query->mass * fade + mass;
    return fade;
}

/* Add to sums of `count` queries the values of the keys [from, to), for `vectors` of the numbers. */
static inline __attribute__((always_inline)) void add_vectors(
    const number *values, const Scores *weights, int from, int to, int64_t dim, const int count,
    const int vectors, float *kept
) {
    floats sums[SHARED][SHARED];
    for (int t = 0; t < count; t++)
        for (int i = 0; i < vectors; i++) sums[t][i] = load_floats(kept + t * dim + i * LANES);
    for (int k = from; k < to; k++) {
        floats value[SHARED];
        for (int i = 0; i < vectors; i++) value[i] = load_wide(values + k * dim + i * LANES);
        for (int t = 0; t < count; t++)
            for (int i = 0; i < vectors; i++) sums[t][i] += weights[t][k] * value[i];
    }
    for (int t = 0; t < count; t++)
        for (int i = 0; i < vectors; i++) store_floats(kept + t * dim + i * LANES, sums[t][i]);
}

/* Do so for all numbers of `count` queries. */
static inline __attribute__((always_inline)) void add_values(
    const number *values, const Scores *weights, int from, int to, int64_t dim, const int count,
    float *sums
) {
    int64_t i = 0;
#define ADD(vectors)                                                                          \
    for (; i + vectors * LANES <= dim; i += vectors * LANES)                                  \
        add_vectors(values + i, weights, from, to, dim, count, vectors, sums + i);
    ADD(4)
    ADD(1)
#undef ADD
    for (; i < dim; i++)
        for (int t = 0; t < count; t++)
            for (int k = from; k < to; k++) sums[t * dim + i] += weights[t][k] * wide(values[k * dim + i]);
}

/* Add the values of a block to the sums of `count` queries, of which each sees its own keys. */
static void add_block(
    const Layer *layer, const number *values, const Scores *weights, const int *from, const int *to,
    const int count, float *sums
) {
    int64_t dim = layer->dim;
    int t = 0, all = 1;
    for (int i = 0; i < count; i++) all &= !from[i] && to[i] == layer->block_size;
    if (all)
        for (; t + SHARED <= count; t += SHARED)
            add_values(values, weights + t, 0, layer->block_size, dim, SHARED, sums + t * dim);
    for (; t < count; t++) /* numbers that a query does not see may be anything: 0 * NaN spreads */
        if (from[t] < to[t]) add_values(values, weights + t, from[t], to[t], dim, 1, sums + t * dim);
}

/* Take a block into account for `count` queries of one head. */
static inline __attribute__((always_inline)) void read_block(
    const Layer *layer, const number *keys, const number *next, int64_t first, Query *queries,
    const float *numbers, float *sums, const int count, const int dim
) {
    int size = layer->block_size, from[QUERIES], to[QUERIES], seen = 0;
    for (int t = 0; t < count; t++) {
        int64_t begin = queries[t].begin - first, end = queries[t].length - first;
        from[t] = begin > 0 ? begin < size ? begin : size : 0;
        to[t] = end > 0 ? end < size ? end : size : 0;
        seen += from[t] < to[t];
    }
    if (!seen) return;
    Scores scores[QUERIES];
    score(layer, numbers, keys, next, count, dim, scores);
    for (int t = 0; t < count; t++) {
        if (from[t] >= to[t]) continue;
        float fade = soften(layer, scores[t], from[t], to[t], queries + t);
        if (fade != 1)
            for (int i = 0; i < dim; i++) sums[t * dim + i] *= fade;
    }
    add_block(layer, keys + dim * size, scores, from, to, count, sums);
}

/* Compute queries of one row, those of a head side by side. */
static inline __attribute__((always_inline)) void read_blocks(
    const Layer *layer, const int32_t *table, Queries *own, const int dim
) {
    int64_t begin = INT64_MAX, length = 0, size = layer->block_size;
    for (int t = 0; t < own->count; t++) {
        if (own->of[t].begin < begin) begin = own->of[t].begin;
        if (own->of[t].length > length) length = own->of[t].length;
    }
    for (int64_t block = begin / size; block * size < length; block++) {
        int64_t after = (block + 1) * size < length ? block + 1 : block;
        for (int t = 0, count; t < own->count; t += count) {
            int head = own->of[t].key_head, most = 1, left = own->count - t;
            while (most < QUERIES && most < left && own->of[t + most].key_head == head) most++;
            const number *keys = head_of(layer, table[block], head);
            const number *next = head_of(layer, table[after], head);
            const float *numbers = own->numbers + t * dim;
            float *sums = own->sums + t * dim;
#define READ(number)                                                                               \
    if (most >= number) {                                                                          \
        read_block(layer, keys, next, block * size, own->of + t, numbers, sums, number, dim);      \
        count = number;                                                                            \
        continue;                                                                                  \
    }
            READ(8)
            READ(4)
            READ(2)
            READ(1)
#undef READ
        }
    }
}

/* Begin a query of a token. */
static void add_query(const Attend *attend, int64_t token, int head, Queries *own) {
    const Layer *layer = attend->layer;
    int64_t length = attend->step->positions[token] + 1, dim = layer->dim;
    const number *in = attend->qkv + token * attend->row_stride + head * dim;
    int at = own->count++;
    own->of[at] = (Query){
        .begin = layer->window && length > layer->window ? length - layer->window : 0,
        .length = length,
        .head = head,
        .key_head = head / (layer->heads / layer->kv_heads),
        .top = -INFINITY,
        .out = attend->out + (token * layer->heads + head) * dim,
    };
    for (int i = 0; i < dim; i++) {
        own->numbers[at * dim + i] = wide(in[i]);
        own->sums[at * dim + i] = 0;
    }
}

/* Write the results of queries of one row, and forget the queries. The compiler unrolls loops whose
   length it knows. */
static void end_queries(const Attend *attend, int64_t token, Queries *own) {
    const Layer *layer = attend->layer;
    const Step *step = attend->step;
    const int32_t *table = step->tables + step->rows[token] * step->table_stride;
    int dim = layer->dim;
    if (dim == 64)
        read_blocks(layer, table, own, 64);
    else if (dim == 128)
        read_blocks(layer, table, own, 128);
    else
        read_blocks(layer, table, own, dim);
    for (int t = 0; t < own->count; t++) {
        const Query *query = own->of + t;
        float mass = query->mass, share = 1;
        if (attend->sinks) {
            float sink = attend->sinks[query->head], top = sink > query->top ? sink : query->top;
            share = power(query->top - top);
            mass = mass * share + power(sink - top);
        }
        for (int i = 0; i < dim; i++) query->out[i] = narrow(own->sums[t * dim + i] * share / mass);
    }
    own->count = 0;
}

/* Attend with heads [first, last) of tokens [from, to). */
static void attend_tokens(const Attend *own, int64_t from, int64_t to, int first, int last) {
    const int32_t *rows = own->step->rows;
    Queries queries;
    queries.count = 0;
    for (int64_t token = from; token < to; token++)
        for (int head = first; head < last; head++) {
            add_query(own, token, head, &queries);
            int ends = head + 1 == last && (token + 1 == to || rows[token + 1] != rows[token]);
            if (ends || queries.count == MOST_QUERIES) end_queries(own, token, &queries);
        }
}

/* Return the largest number of units, halved until all threads have work, that are done together.
   units: how many there are, each `times` times. */
static int64_t together(int64_t most, int64_t units, int64_t times) {
    int threads = omp_get_num_threads();
    while (most > 1 && times * ((units + most - 1) / most) < threads) most /= 2;
    return most < 1 ? 1 : most;
}

/* Attend where each token is of another row: it reads no other new key, so no thread waits. */
static void attend_apart(const Attend *own) {
    const Layer *layer = own->layer;
    const Step *step = own->step;
    int kv_heads = layer->kv_heads, group = layer->heads / kv_heads;
    int most = together(MOST_QUERIES / 2 / group, kv_heads, step->tokens);
    int parts = (kv_heads + most - 1) / most;
#pragma omp for schedule(dynamic) nowait
    for (int64_t i = 0; i < step->tokens * parts; i++) {
        int64_t token = i / parts;
        int first = i % parts * most, last = first + most < kv_heads ? first + most : kv_heads;
        number *row = own->qkv + token * own->row_stride;
        for (int head = first; head < last; head++)
            write_head(layer, step, row, token, head, own->query_norm, own->key_norm);
        attend_tokens(own, token, token + 1, first * group, last * group);
    }
}

/* Compute what AttentionBackend.attend says. See tape.c for kernels. */
void attend(const Attend *own) {
    const Layer *layer = own->layer;
    const Step *step = own->step;
    int kv_heads = layer->kv_heads, group = layer->heads / kv_heads;
    if (step->apart) {
        attend_apart(own);
        return;
    }
#pragma omp for
    for (int64_t i = 0; i < step->tokens * kv_heads; i++)
        write_head(
            layer, step, own->qkv + i / kv_heads * own->row_stride, i / kv_heads, i % kv_heads,
            own->query_norm, own->key_norm
        );
    int64_t most = together(MOST_QUERIES / group, step->tokens, kv_heads);
    int64_t parts = (step->tokens + most - 1) / most;
    /* The last tokens of a prompt read most keys. They come first, so that no thread ends late. */
#pragma omp for schedule(dynamic) nowait
    for (int64_t i = parts * kv_heads - 1; i >= 0; i--) {
        int64_t from = i / kv_heads * most, to = from + most < step->tokens ? from + most : step->tokens;
        int head = i % kv_heads;
        attend_tokens(own, from, to, head * group, (head + 1) * group);
    }
}
