/* Products of chosen experts on a CPU, with plain matrices, or with -DCODED those of 8 or 4 bits.

A pair is a token and one of its experts. Pairs are put in the order of their experts, and each
expert multiplies all of its pairs at once. A pair's bits do not depend on other pairs, since those
of a row do not depend on other rows (see plain.h and coded.h), and a token's pairs are added in
the order of its choice. So a token's bits depend on that token alone. */

#include <omp.h>

#ifdef CODED
#include "coded.h"
#else
#include "plain.h"
#endif

enum { PART = 1024 }; /* numbers of a row that a thread takes at once */

/* The order of pairs. The order of these, and of what follows, is that of experts.py. */
typedef struct {
    int64_t *used;   /* [2]: the experts and the pairs that there are */
    int64_t *active; /* [experts]: the experts with pairs */
    int64_t *first;  /* [experts + 1]: where the pairs of an active expert begin */
    int64_t *tokens; /* [pairs]: the token of each, in order */
    int64_t *places; /* [tokens, chosen]: where a pair is in the order, -1 for no expert here */
} Order;

typedef struct {
    const int32_t *ids; /* [tokens, chosen], negative for no expert here */
    int64_t tokens, chosen, experts;
    Order order;
} Sort;

typedef struct {
    const Matrix *matrices; /* [experts], of one size */
    const Order *order;
    const number *x;     /* [rows, inputs], `stride` numbers apart */
    const int64_t *list; /* [pairs]: the row of each in its order, null for rows in that order */
    number *out;         /* [pairs, outputs] in their order */
    void *memory;        /* see inputs_of */
    int64_t rows, stride;
} Products;

typedef struct {
    const number *results; /* [pairs, count] in their order */
    const int64_t *places; /* [tokens, chosen] */
    const float *weights;  /* [tokens, chosen] */
    number *out;           /* [tokens, count], `stride` numbers apart */
    int64_t tokens, chosen, count, stride;
    int32_t add; /* whether the sum is added to out */
} Sum;

int tile(void) { return TILE; }

/* Put pairs in the order of their experts, and those of an expert in the order of their tokens. */
void sort_pairs(const Sort *own) {
    const Order *order = &own->order;
    int64_t pairs = own->tokens * own->chosen, experts = own->experts;
#pragma omp single nowait
    {
        int64_t next[experts], active = 0, begin = 0; /* next: counts, then places */
        for (int64_t e = 0; e < experts; e++) next[e] = 0;
        for (int64_t p = 0; p < pairs; p++)
            if (own->ids[p] >= 0) next[own->ids[p]]++;
        for (int64_t e = 0; e < experts; e++) {
            int64_t count = next[e];
            next[e] = begin;
            if (!count) continue;
            order->active[active] = e;
            order->first[active++] = begin;
            begin += count;
        }
        order->first[active] = begin;
        order->used[0] = active;
        order->used[1] = begin;
        for (int64_t p = 0; p < pairs; p++) {
            int64_t place = own->ids[p] < 0 ? -1 : next[own->ids[p]]++;
            order->places[p] = place;
            if (place >= 0) order->tokens[place] = p / own->chosen;
        }
    }
}

/* Write the products of all pairs with their experts' matrices. */
void products(const Products *own) {
    const Matrix *one = own->matrices;
    const Order *order = own->order;
    int64_t tiles = (one->outputs + TILE - 1) / TILE, rows = own->list ? own->rows : order->used[1];
    Inputs x = inputs_of(own->x, rows, own->stride, one->inputs, own->memory);
    int64_t part = tiles / (2 * omp_get_num_threads());
    if (part < 1) part = 1;
    /* Experts have different numbers of pairs. */
#pragma omp for schedule(dynamic, part) nowait
    for (int64_t i = 0; i < order->used[0] * tiles; i++) {
        int64_t place = i / tiles, from = order->first[place];
        const Matrix *matrix = own->matrices + order->active[place];
        Inputs mine = x;
        if (!own->list) mine = inputs_from(x, from, one->inputs);
        multiply_tile(
            matrix, i % tiles, &mine, own->list ? own->list + from : NULL,
            order->first[place + 1] - from, own->out + from * one->outputs
        );
    }
}

/* Write each token's weighted sum of its experts' results, or add it. */
void sum_pairs(const Sum *own) {
    int64_t count = own->count, parts = (count + PART - 1) / PART, chosen = own->chosen;
#pragma omp for nowait
    for (int64_t i = 0; i < own->tokens * parts; i++) {
        int64_t t = i / parts, from = i % parts * PART;
        int64_t width = from + PART < count ? PART : count - from;
        number *out = own->out + t * own->stride + from;
        float sum[PART] = {0};
        for (int64_t k = 0; k < chosen; k++) {
            int64_t place = own->places[t * chosen + k];
            if (place < 0) continue;
            const number *result = own->results + place * count + from;
            float weight = own->weights[t * chosen + k];
#pragma omp simd
            for (int64_t c = 0; c < width; c++) sum[c] += weight * wide(result[c]);
        }
        if (own->add)
            for (int64_t c = 0; c < width; c++) out[c] = narrow(wide(out[c]) + sum[c]);
        else
            for (int64_t c = 0; c < width; c++) out[c] = narrow(sum[c]);
    }
}
