/* The gated delta net on a CPU: its convolution, its recurrence in rows of few tokens, and its norm.

See ops/causal_conv.py and ops/gated_delta.py for what is computed. A row's bits depend on that row
alone. All sums are float. */

#include <stddef.h>
#include <string.h>

#include "numbers.h"

/* MOST_DIM, MOST_TAPS and FEW_TOKENS stand in recurrent.py too, which refuses more. */
enum { MOST_DIM = 256, MOST_TAPS = 8, FEW_TOKENS = 8, CHANNELS = 256 };

/* The rows of a step. The order is that of recurrent.py; see StateRows for what the parts are. */
typedef struct {
    int64_t rows;
    const int32_t *starts, *state_in, *state_out, *settled;
    const int32_t *save_starts, *save_offsets, *save_rows;
} Rows;

typedef struct {
    const Rows *rows;
    const number *x;      /* [tokens, channels], `stride` numbers apart */
    const float *factors; /* [taps, channels], the newest token's last */
    number *state;        /* [states, channels, taps - 1], the newest last */
    number *out;          /* [tokens, channels] */
    int64_t stride, channels, taps;
} Conv;

typedef struct {
    const Rows *rows;
    const number *qkv;        /* [tokens, 2 key_heads key_dim + heads value_dim] */
    const number *ba;         /* [tokens, 2 heads], `stride` numbers apart */
    const float *rate, *bias; /* [heads]: exp(a_log), and what is added to the decay's input */
    float *state;             /* [states, heads, key_dim, value_dim] */
    number *out;              /* [tokens, heads value_dim] */
    int64_t stride, heads, key_heads, key_dim, value_dim;
    float eps; /* added to the square of the length of queries and keys */
} Delta;

typedef struct {
    const number *x;    /* [tokens, heads dim] */
    const number *gate; /* the same, `stride` numbers apart */
    const number *weight; /* [dim] */
    number *out;        /* [tokens, heads dim] */
    int64_t tokens, stride, heads, dim;
    float eps;
} GatedNorm;

/* Return one of the state rows that are written after a row's `count`-th token, -1 for no more. They
   are the row's own, if the token is the last settled one or a draft, and those of saves. */
static int64_t target_of(const Rows *rows, int64_t row, int64_t count, int64_t index) {
    int64_t draft = count - rows->settled[row];
    if (draft >= 0 && rows->state_out[row] >= 0 && index-- == 0) return rows->state_out[row] + draft;
    for (int64_t s = rows->save_starts[row]; s < rows->save_starts[row + 1]; s++)
        if (rows->save_offsets[s] == count && index-- == 0) return rows->save_rows[s];
    return -1;
}

static inline float silu(float x) {
    float part = power(-fabsf(x));
    return x / (1 + part) * (x < 0 ? part : 1);
}

/* Convolve some channels of a row. */
static void convolve(const Conv *own, int64_t row, int64_t from, int width) {
    const Rows *rows = own->rows;
    int64_t kept = own->taps - 1, first = rows->starts[row], count = rows->starts[row + 1] - first;
    float window[MOST_TAPS][CHANNELS]; /* the last inputs, in a ring */
    number *state = own->state;
    int64_t begin = rows->state_in[row], target;
    for (int64_t j = 0; j < kept; j++)
        for (int c = 0; c < width; c++)
            window[j][c] =
                begin < 0 ? 0 : wide(state[(begin * own->channels + from + c) * kept + j]);
    for (int64_t t = 0; t < count; t++) {
        const number *x = own->x + (first + t) * own->stride + from;
        number *out = own->out + (first + t) * own->channels + from;
        float *newest = window[(kept + t) % own->taps], sums[CHANNELS] = {0};
        for (int c = 0; c < width; c++) newest[c] = wide(x[c]);
        for (int64_t j = 0; j <= kept; j++) {
            const float *input = window[(t + j) % own->taps];
            const float *factors = own->factors + j * own->channels + from;
            for (int c = 0; c < width; c++) sums[c] += input[c] * factors[c];
        }
#pragma omp simd
        for (int c = 0; c < width; c++) out[c] = narrow(silu(wide(narrow(sums[c]))));
        for (int64_t w = 0; (target = target_of(rows, row, t + 1, w)) >= 0; w++)
            for (int64_t j = 0; j < kept; j++) {
                const float *input = window[(t + 1 + j) % own->taps];
                for (int c = 0; c < width; c++)
                    state[(target * own->channels + from + c) * kept + j] = narrow(input[c]);
            }
    }
}

/* Write SiLU of the convolution of each token with those before it, and the states. */
void causal_conv(const Conv *own) {
    int64_t parts = (own->channels + CHANNELS - 1) / CHANNELS;
#pragma omp for nowait
    for (int64_t i = 0; i < own->rows->rows * parts; i++) {
        int64_t from = i % parts * CHANNELS, left = own->channels - from;
        convolve(own, i / parts, from, left < CHANNELS ? left : CHANNELS);
    }
}

/* Write x with length `length`. */
static void of_length(const number *x, int64_t count, float eps, float length, float *out) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < count; i++) squares += wide(x[i]) * wide(x[i]);
    float scale = length / sqrtf(squares + eps);
    for (int64_t i = 0; i < count; i++) out[i] = wide(x[i]) * scale;
}

/* One token of a head: write the state after it, and its output. before: null for zeros; may be
   `after`. */
static void advance(
    const float *before, float *after, const float *q, const float *k, const number *v, float kept,
    float strength, int64_t key_dim, int64_t value_dim, number *out
) {
    float change[MOST_DIM], sum[MOST_DIM];
    for (int64_t i = 0; i < value_dim; i++) change[i] = sum[i] = 0;
    if (before)
        for (int64_t j = 0; j < key_dim; j++) {
            const float *line = before + j * value_dim;
            float factor = k[j] * kept;
#pragma omp simd
            for (int64_t i = 0; i < value_dim; i++) change[i] += factor * line[i];
        }
    for (int64_t i = 0; i < value_dim; i++) change[i] = (wide(v[i]) - change[i]) * strength;
    for (int64_t j = 0; j < key_dim; j++) {
        const float *line = before ? before + j * value_dim : change;
        float *next = after + j * value_dim, factor = before ? kept : 0, key = k[j], query = q[j];
#pragma omp simd
        for (int64_t i = 0; i < value_dim; i++) {
            float value = factor * line[i] + key * change[i];
            next[i] = value;
            sum[i] += query * value;
        }
    }
    for (int64_t i = 0; i < value_dim; i++) out[i] = narrow(sum[i]);
}

/* Compute a head of a row, token by token. spare: memory for a state. */
static void recur(const Delta *own, int64_t row, int64_t head, float *spare) {
    const Rows *rows = own->rows;
    int64_t first = rows->starts[row], count = rows->starts[row + 1] - first;
    int64_t key_dim = own->key_dim, value_dim = own->value_dim, size = key_dim * value_dim;
    int64_t keys = own->key_heads * key_dim, width = 2 * keys + own->heads * value_dim;
    int64_t key_head = head / (own->heads / own->key_heads);
    const float *before =
        rows->state_in[row] < 0 ? NULL : own->state + (rows->state_in[row] * own->heads + head) * size;
    for (int64_t t = 0; t < count; t++) {
        const number *qkv = own->qkv + (first + t) * width, *ba = own->ba + (first + t) * own->stride;
        float q[MOST_DIM], k[MOST_DIM];
        of_length(qkv + key_head * key_dim, key_dim, own->eps, 1 / sqrtf(key_dim), q);
        of_length(qkv + keys + key_head * key_dim, key_dim, own->eps, 1, k);
        float strength = 1 / (1 + expf(-wide(ba[head])));
        float input = wide(ba[own->heads + head]) + own->bias[head];
        float speed = input > 20 ? input : log1pf(expf(input));
        int64_t target = target_of(rows, row, t + 1, 0);
        float *after = target < 0 ? spare : own->state + (target * own->heads + head) * size;
        advance(
            before, after, q, k, qkv + 2 * keys + head * value_dim, expf(-own->rate[head] * speed),
            strength, key_dim, value_dim, own->out + ((first + t) * own->heads + head) * value_dim
        );
        for (int64_t w = 1; (target = target_of(rows, row, t + 1, w)) >= 0; w++)
            memcpy(own->state + (target * own->heads + head) * size, after, size * sizeof(float));
        before = after;
    }
}

/* Write the outputs and the states of rows of few tokens. */
void delta_few(const Delta *own) {
    const Rows *rows = own->rows;
    float spare[own->key_dim * own->value_dim];
#pragma omp for schedule(dynamic) nowait
    for (int64_t i = 0; i < rows->rows * own->heads; i++) {
        int64_t row = i / own->heads;
        if (rows->starts[row + 1] - rows->starts[row] <= FEW_TOKENS)
            recur(own, row, i % own->heads, spare);
    }
}

/* Write the norm of each head, times SiLU of its gate. */
void gated_norm(const GatedNorm *own) {
#pragma omp for nowait
    for (int64_t i = 0; i < own->tokens * own->heads; i++) {
        int64_t t = i / own->heads, head = i % own->heads;
        const number *gate = own->gate + t * own->stride + head * own->dim;
        number *out = own->out + i * own->dim;
        norm(own->x + i * own->dim, own->weight, 0, own->dim, own->eps, out);
#pragma omp simd
        for (int64_t c = 0; c < own->dim; c++) out[c] = narrow(wide(out[c]) * silu(wide(gate[c])));
    }
}
