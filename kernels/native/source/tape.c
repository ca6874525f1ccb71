/* Calls of kernels by a team of threads.

A kernel is a function that all threads of a team call at once. They share its work by OpenMP's
loops, and a kernel ends without a barrier. Calls of a tape are made in their order, with a barrier
between two of them. So a team begins once for many kernels, and its threads never sleep in between.
*/

#include <stdint.h>

typedef void (*Kernel)(const void *arguments);

/* The order is that of tape.py. */
typedef struct {
    Kernel kernel;
    const void *arguments;
} Call;

/* Call one kernel. */
void call_one(Kernel kernel, const void *arguments, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    kernel(arguments);
}

/* Call kernels in their order. */
void call_all(const Call *calls, int64_t count, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < count; i++) {
        if (i) {
#pragma omp barrier
        }
        calls[i].kernel(calls[i].arguments);
    }
}
