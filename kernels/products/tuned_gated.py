"""Where kernels.gated_gemm_triton was measured to be faster than the library's product and the
activation after it, by benchmarks/kernels/gpu_kernels.py --only gated --tune, which prints entries.

(outputs of each half, inputs) of a matrix: up to how many rows, in rising order, which fields of a
GatedConfig; None where the library is faster, as it is taken to be beyond the last. Llama-3.1-8B's
is not here: what the kernel gains alone it loses in a step, where the card's power limit sets the
pace of large products.
"""

from __future__ import annotations

Fields = tuple[int, int, int, int, int, int, bool]
_ANY = 1 << 30

GATED: dict[tuple[int, int], tuple[tuple[int, Fields | None], ...]] = {
    (3072, 1024): (  # Qwen3-0.6B
        (64, (64, 64, 128, 4, 4, 1, True)),
        (128, None),
        (256, (64, 64, 64, 4, 4, 2, True)),
        (_ANY, (128, 64, 64, 4, 3, 2, True)),
    ),
}
