"""Sizes for which the gated product is faster than the library's product and its activation.

The kernel is gated_gemm_triton.py. `benchmarks/kernels/gpu_kernels.py --only gated --tune` measures
and prints entries. Many rows on a Hopper GPU have another kernel (hopper/gated_hopper.py).

The keys are (outputs of each half, inputs) of a matrix. An entry holds a largest number of rows, in
rising order, and the fields of a GatedConfig, or None where the library is faster. The library is
taken to be faster beyond the last entry. Llama-3.1-8B is not here: the kernel's gain alone is lost
in a whole step, where the card's power limit sets the pace of large products.
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
