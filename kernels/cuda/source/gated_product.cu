// silu(x gate^T) * (x up^T) for many rows of x, in 16 bits. A block of a cluster loads rows of the gate,
// the other one those of up.
//
// The compiler is given: W_STAGES, X_STAGES, HALF (0: bfloat16, 1: float16).
#define EIGHT 0
#include "row_products.cuh"
// Results are those of an expert without biases and scales.
#define GATED 1
#define GELU 0
#define CLAMPED 0
#define ALPHA 0.0f
#define LIMIT 0.0f
#define ROW_SCALES 0
#define WITH_BIAS 0
#include "expert_results.cuh"

constexpr int OUTPUTS = COLUMNS / 2;

extern "C" __global__ void __launch_bounds__(384, 1) __cluster_dims__(2, 1, 1) gated_product(
    const __grid_constant__ TileMap x_map, const __grid_constant__ TileMap w_map, u16* out,
    const __grid_constant__ Sizes sizes, int items) {
    auto write = [&](const float(&sum)[SUMS], const Item& item, int own) {
        u16* targets[2];
        for (int i = 0; i < 2; i++) {
            const int row = item.row + own + own_row() + 8 * i;
            targets[i] = row < sizes.rows ? out + u64(row) * sizes.outputs : nullptr;
        }
        const Columns columns = {nullptr, nullptr, sizes.outputs};
        write_numbers<OUTPUTS>(sum, targets, item.part * OUTPUTS, columns);
    };
    multiply_rows(&x_map, &w_map, sizes, items, OUTPUTS, sizes.outputs, write);
}
