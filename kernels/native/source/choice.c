/* The choice of experts from the router's product, in float. See routing.py for its steps.

Of equal scores, the lower index is chosen. A token's choice depends on that token alone. */

#include "numbers.h"

/* MOST stands in experts.py too, which refuses more. */
enum { MOST = 1024 };

/* The arguments of `choose`. The order is that of experts.py. */
typedef struct {
    const float *logits; /* [tokens, experts] */
    const float *bias;   /* [experts]: added to the scores for the choice alone, null for none */
    const float *scales; /* [own experts]: factors of experts on the weights, null for ones */
    int32_t *ids;        /* [tokens, chosen]: numbers on this rank, -1 for other ranks' */
    float *weights;      /* [tokens, chosen] */
    int64_t tokens, experts, first, own; /* first, own: this rank's experts */
    int32_t chosen, groups, chosen_groups, sigmoid, normalised;
    float scale, tiny;
} Choose;

/* Return the index of the largest of numbers that are not yet taken, the first one of equals. */
static int largest(const float *numbers, const uint8_t *taken, int count) {
    int best = -1;
    for (int i = 0; i < count; i++)
        if (!taken[i] && (best < 0 || numbers[i] > numbers[best])) best = i;
    return best;
}

/* Write the scores of a token: the softmax, or the sigmoid of each. */
static void score(const float *logits, int count, int sigmoid, float *scores) {
    if (sigmoid) {
        for (int i = 0; i < count; i++) {
            float part = power(-fabsf(logits[i]));
            scores[i] = (logits[i] < 0 ? part : 1) / (1 + part);
            if (logits[i] != logits[i]) scores[i] = logits[i];
        }
        return;
    }
    float most = logits[0], sum = 0;
    for (int i = 1; i < count; i++) most = logits[i] > most ? logits[i] : most;
    for (int i = 0; i < count; i++) sum += scores[i] = power(logits[i] - most);
    for (int i = 0; i < count; i++) scores[i] /= sum;
}

/* Take all experts but those of the best groups: whose two largest numbers have the largest sums. */
static void take_other_groups(const Choose *own, const float *ranked, uint8_t *taken) {
    int size = own->experts / own->groups;
    float sums[MOST];
    uint8_t best[MOST] = {0};
    for (int g = 0; g < own->groups; g++) {
        const float *numbers = ranked + g * size;
        uint8_t *mine = taken + g * size;
        int one = largest(numbers, mine, size);
        mine[one] = 1;
        int two = largest(numbers, mine, size);
        mine[one] = 0;
        sums[g] = two < 0 ? numbers[one] : numbers[one] + numbers[two];
    }
    for (int k = 0; k < own->chosen_groups; k++) best[largest(sums, best, own->groups)] = 1;
    for (int i = 0; i < own->experts; i++) taken[i] = !best[i / size];
}

static void choose_one(const Choose *own, int64_t t) {
    float scores[MOST], ranked[MOST], total = 0;
    uint8_t taken[MOST] = {0};
    int32_t *ids = own->ids + t * own->chosen;
    float *weights = own->weights + t * own->chosen;
    score(own->logits + t * own->experts, own->experts, own->sigmoid, scores);
    for (int i = 0; i < own->experts; i++) ranked[i] = own->bias ? scores[i] + own->bias[i] : scores[i];
    if (own->chosen_groups < own->groups) take_other_groups(own, ranked, taken);
    for (int k = 0; k < own->chosen; k++) {
        ids[k] = largest(ranked, taken, own->experts);
        taken[ids[k]] = 1;
        weights[k] = scores[ids[k]];
        total += weights[k];
    }
    for (int k = 0; k < own->chosen; k++) {
        int64_t local = ids[k] - own->first;
        int is_own = local >= 0 && local < own->own;
        if (own->normalised) weights[k] /= total + own->tiny;
        weights[k] *= own->scale;
        if (own->scales && is_own) weights[k] *= own->scales[local];
        ids[k] = is_own ? local : -1;
    }
}

/* Write the experts of each token. See tape.c for kernels. */
void choose(const Choose *own) {
#pragma omp for nowait
    for (int64_t t = 0; t < own->tokens; t++) choose_one(own, t);
}
