/* x W^T on a CPU for matrices W of 8 or 4 bits. See coded.h. */

#include "coded.h"

/* Groups of inputs that each thread rounds for itself: that takes less time than to wait for another.
   It stands in native_layouts.py too. */
enum { ROUNDED_ALONE = 256 };

/* The arguments of `product`. The order is that of native_layouts.py. */
typedef struct {
    const Matrix *matrix;
    const number *x; /* [rows, inputs], `stride` numbers apart */
    number *out;     /* [rows, outputs] */
    void *memory;    /* for rounded inputs, 40 bytes a group; null if each thread rounds them */
    int64_t rows, stride;
} Product;

int tile(void) { return TILE; }

/* Write x W^T. See tape.c for kernels. */
void product(const Product *own) {
    const Matrix *matrix = own->matrix;
    int64_t tiles = (matrix->outputs + TILE - 1) / TILE;
    int8_t codes[ROUNDED_ALONE * GROUP];
    float scales[ROUNDED_ALONE];
    int32_t sums[ROUNDED_ALONE];
    Inputs x = {codes, scales, sums};
    if (own->memory)
        x = inputs_of(own->x, own->rows, own->stride, matrix->inputs, own->memory);
    else
        for (int64_t i = 0; i < own->rows * groups_of(matrix->inputs); i++)
            round_one(own->x, own->stride, matrix->inputs, i, &x);
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < tiles; i++) multiply_tile(matrix, i, &x, NULL, own->rows, own->out);
}
