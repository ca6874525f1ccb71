/* Attention over the paged cache (Kwon et al. 2023), for all tokens of a step on a CPU.

A query reads the blocks of its row where they lie, one after the other, with a running softmax
(Milakov and Gimelshein 2018). It takes keys in groups of GROUP by their places in a block, and adds
in their order. So the bits of a result depend on the query's own position and inputs alone: not on
other rows, on how a prompt was cut into chunks, or on the number of threads.

All sums are float. */

#include <omp.h>

#include "numbers.h"

/* MOST_DIM and MOST_BLOCK stand in native_backend.py too, which refuses more. */
enum { GROUP = 4, MOST_DIM = 512, MOST_BLOCK = 256, MOST_HEADS = 16 };

/* What a layer has at every step. The order and the types are those of native_backend.py. */
typedef struct {
    number *cache;        /* [blocks, block_size, 2 kv_heads, dim], the keys' heads first */
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
    number *block = layer->cache + slot / layer->block_size * layer->block_stride;
    number *target = block + (slot % layer->block_size * 2 * layer->kv_heads + head) * dim;
    for (int i = 0; i < dim; i++) {
        target[i] = key[i];
        target[layer->kv_heads * dim + i] = value[i];
    }
}

/* Write the scores of one query with the keys of a block; those outside of [from, to) are -inf. */
static inline __attribute__((always_inline)) void score(
    const Layer *layer, const float *query, const number *keys, int from, int to, float *scores,
    const int dim
) {
    int size = layer->block_size;
    int64_t stride = (int64_t)2 * layer->kv_heads * dim;
    for (int k = 0; k < size; k += GROUP) {
        float sums[GROUP] = {0};
        if (k < to && k + GROUP > from) {
            const number *a = keys + k * stride;
            /* A group may end behind its block: then its last keys are the first key again. */
            const number *b = k + 1 < size ? a + stride : a, *c = k + 2 < size ? a + 2 * stride : a;
            const number *d = k + 3 < size ? a + 3 * stride : a;
            float w = 0, x = 0, y = 0, z = 0;
#pragma omp simd reduction(+ : w, x, y, z)
            for (int i = 0; i < dim; i++) {
                w += query[i] * wide(a[i]);
                x += query[i] * wide(b[i]);
                y += query[i] * wide(c[i]);
                z += query[i] * wide(d[i]);
            }
            sums[0] = w, sums[1] = x, sums[2] = y, sums[3] = z;
        }
        for (int i = 0; i < GROUP; i++) scores[k + i] = sums[i] * layer->scale;
    }
    if (layer->softcap > 0)
        for (int k = from; k < to; k++)
            scores[k] = tanhf(scores[k] / layer->softcap) * layer->softcap;
    for (int k = 0; k < from; k++) scores[k] = -INFINITY;
    for (int k = to; k < (size + GROUP - 1) / GROUP * GROUP; k++) scores[k] = -INFINITY;
}

/* Add values with their weights to a sum that has been multiplied with `fade`. */
static inline __attribute__((always_inline)) void add_values(
    const Layer *layer, const float *weights, const number *values, int from, int to, float fade,
    float *sum, const int dim
) {
    /* Numbers behind a row's end may be anything, and 0 * NaN would spread. */
    static const number zeros[MOST_DIM];
    int64_t stride = (int64_t)2 * layer->kv_heads * dim;
    for (int i = 0; i < dim; i++) sum[i] *= fade;
    for (int k = from / GROUP * GROUP; k < to; k += GROUP) {
        const number *four[GROUP];
        for (int i = 0; i < GROUP; i++)
            four[i] = k + i >= from && k + i < to ? values + (k + i) * stride : zeros;
        float w = weights[k], x = weights[k + 1], y = weights[k + 2], z = weights[k + 3];
#pragma omp simd
        for (int i = 0; i < dim; i++)
            sum[i] += w * wide(four[0][i]) + x * wide(four[1][i]) + y * wide(four[2][i]) +
                      z * wide(four[3][i]);
    }
}

/* Attend with consecutive query heads of one token. */
static inline __attribute__((always_inline)) void attend_heads(
    const Layer *layer, const Step *step, const number *row, number *out, int64_t token, int first,
    int count, const float *sinks, const int dim
) {
    int group = layer->heads / layer->kv_heads, size = layer->block_size;
    int padded = (size + GROUP - 1) / GROUP * GROUP;
    int64_t length = step->positions[token] + 1;
    int64_t begin = layer->window && length > layer->window ? length - layer->window : 0;
    const int32_t *table = step->tables + step->rows[token] * step->table_stride;
    float queries[MOST_HEADS][MOST_DIM], sums[MOST_HEADS][MOST_DIM];
    float tops[MOST_HEADS], masses[MOST_HEADS], scores[MOST_BLOCK + GROUP];
    for (int h = 0; h < count; h++) {
        tops[h] = -INFINITY, masses[h] = 0;
        for (int i = 0; i < dim; i++) {
            queries[h][i] = wide(row[(first + h) * dim + i]);
            sums[h][i] = 0;
        }
    }
    for (int64_t block = begin / size; block * size < length; block++) {
        int from = begin > block * size ? begin - block * size : 0;
        int to = length - block * size < size ? length - block * size : size;
        const number *base = layer->cache + table[block] * layer->block_stride;
        for (int h = 0; h < count; h++) {
            const number *keys = base + (first + h) / group * dim;
            score(layer, queries[h], keys, from, to, scores, dim);
            float top = tops[h], mass = 0;
            for (int k = from; k < to; k++) top = scores[k] > top ? scores[k] : top;
            float fade = power(tops[h] - top);
#pragma omp simd reduction(+ : mass)
            for (int k = 0; k < padded; k++) {
                scores[k] = power(scores[k] - top);
                mass += scores[k];
            }
            tops[h] = top, masses[h] = masses[h] * fade + mass;
            add_values(layer, scores, keys + layer->kv_heads * dim, from, to, fade, sums[h], dim);
        }
    }
    for (int h = 0; h < count; h++) {
        float mass = masses[h], share = 1;
        if (sinks) {
            float sink = sinks[first + h], top = sink > tops[h] ? sink : tops[h];
            share = power(tops[h] - top);
            mass = mass * share + power(sink - top);
        }
        for (int i = 0; i < dim; i++)
            out[(first + h) * dim + i] = narrow(sums[h][i] * share / mass);
    }
}

/* Attend with consecutive query heads of a token. The compiler unrolls loops whose length it knows.
*/
static void attend_token(
    const Layer *layer, const Step *step, const number *row, number *out, int64_t token, int first,
    int count, const float *sinks
) {
    number *own = out + token * layer->heads * layer->dim;
    if (layer->dim == 64)
        attend_heads(layer, step, row, own, token, first, count, sinks, 64);
    else if (layer->dim == 128)
        attend_heads(layer, step, row, own, token, first, count, sinks, 128);
    else
        attend_heads(layer, step, row, own, token, first, count, sinks, layer->dim);
}

/* Return the largest number of units, halved until all threads have work, that are done together:
   heads that are neighbours lie side by side in memory. */
static int together(int most, int units, int64_t tokens) {
    int threads = omp_get_num_threads();
    while (most > 1 && tokens * ((units + most - 1) / most) < threads) most /= 2;
    return most;
}

/* Attend where each token is of another row: it reads no other new key, so no thread waits. */
static void attend_apart(const Attend *own) {
    const Layer *layer = own->layer;
    const Step *step = own->step;
    int kv_heads = layer->kv_heads, group = layer->heads / kv_heads;
    int most = together(MOST_HEADS / group, kv_heads, step->tokens);
    int parts = (kv_heads + most - 1) / most;
#pragma omp for schedule(dynamic) nowait
    for (int64_t i = 0; i < step->tokens * parts; i++) {
        int64_t token = i / parts;
        int first = i % parts * most, last = first + most < kv_heads ? first + most : kv_heads;
        number *row = own->qkv + token * own->row_stride;
        for (int head = first; head < last; head++)
            write_head(layer, step, row, token, head, own->query_norm, own->key_norm);
        attend_token(
            layer, step, row, own->out, token, first * group, (last - first) * group, own->sinks
        );
    }
}

/* Compute what AttentionBackend.attend says. See tape.c for kernels. */
void attend(const Attend *own) {
    const Layer *layer = own->layer;
    const Step *step = own->step;
    int heads = layer->heads, kv_heads = layer->kv_heads;
    if (step->apart && heads / kv_heads <= MOST_HEADS) {
        attend_apart(own);
        return;
    }
    int most = together(MOST_HEADS, heads, step->tokens), parts = (heads + most - 1) / most;
#pragma omp for
    for (int64_t i = 0; i < step->tokens * kv_heads; i++)
        write_head(
            layer, step, own->qkv + i / kv_heads * own->row_stride, i / kv_heads, i % kv_heads,
            own->query_norm, own->key_norm
        );
#pragma omp for schedule(dynamic) nowait
    for (int64_t i = 0; i < step->tokens * parts; i++) {
        int first = i % parts * most, count = heads - first < most ? heads - first : most;
        const number *row = own->qkv + i / parts * own->row_stride;
        attend_token(layer, step, row, own->out, i / parts, first, count, own->sinks);
    }
}
