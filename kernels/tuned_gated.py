"""Where kernels.gated_gemm_triton was measured to be faster than the library's product and the activation after it, by
benchmarks/gpu_kernels.py --only gated --tune, which prints entries.

(outputs of each half, inputs) of a matrix: up to how many rows, in rising order, which fields of a GatedConfig; None
where the library is faster, as it is taken to be beyond the last.
"""

from __future__ import annotations

Fields = tuple[int, int, int, int, int, int, bool, bool]

GATED: dict[tuple[int, int], tuple[tuple[int, Fields | None], ...]] = {}
