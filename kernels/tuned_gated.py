"""Where kernels.gated_gemm_triton was measured to be faster than the library's product and the activation after it, by
benchmarks/gpu_kernels.py --only gated --tune, which prints entries.

(outputs of each half, inputs) of a matrix: up to how many rows, in rising order, which fields of a GatedConfig; None
where the library is faster, as it is taken to be beyond the last.
"""

from __future__ import annotations

Fields = tuple[int, int, int, int, int, int, bool, bool]

GATED: dict[tuple[int, int], tuple[tuple[int, Fields | None], ...]] = {
    (3072, 1024): (
        (64, (64, 64, 128, 4, 4, 1, False, True)), (128, None), (256, (64, 64, 64, 4, 4, 2, False, True)),
        (512, (128, 64, 64, 4, 3, 2, False, True)), (1 << 20, (128, 128, 64, 8, 4, 1, False, True))),
    (14336, 4096): (
        (32, None), (64, (64, 64, 128, 4, 4, 1, False, True)), (128, (128, 64, 64, 4, 3, 2, False, True)),
        (256, (256, 64, 64, 8, 4, 1, False, True)), (1024, None), (1 << 20, (128, 128, 64, 8, 4, 1, False, True))),
}
