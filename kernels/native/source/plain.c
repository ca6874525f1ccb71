/* x W^T on a CPU for matrices W of float or bfloat16. See plain.h. */

#include "plain.h"

/* The arguments of `product`. The order is that of native_layouts.py. */
typedef struct {
    const Matrix *matrix;
    const number *x; /* [rows, inputs], `stride` numbers apart */
    number *out;     /* [rows, outputs] */
    void *memory;    /* for x in float, filled up to whole blocks if there are many rows; null if x is
                        float and there are few */
    int64_t rows, stride;
} Product;

int tile(void) { return TILE; }

/* Write x W^T. See tape.c for kernels. */
void product(const Product *own) {
    int64_t tiles = (own->matrix->outputs + TILE - 1) / TILE;
    int64_t inputs = own->matrix->inputs, many = own->rows > MOST_ROWS;
    Inputs x = many ? blocked_inputs_of(own->x, own->rows, own->stride, inputs, own->memory)
                    : inputs_of(own->x, own->rows, own->stride, inputs, own->memory);
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < tiles; i++)
        multiply_tile(own->matrix, i, &x, NULL, own->rows, own->out);
}
