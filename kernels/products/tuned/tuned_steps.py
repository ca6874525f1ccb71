"""Products of one row that are faster streamed, as measured within whole steps.

A product that is timed by itself, or in a chain without the kernels of other kinds, does not show
what it costs to begin while the kernel before still runs. benchmarks/kernels/gpu_step.py does.
"""

from __future__ import annotations

STREAMED_ALONE = {
    (128256, 4096, False),  # Llama-3.1-8B, lm_head
    (5120, 2048, False),  # Qwen3-30B-A3B, qkv
}
"""Sizes (outputs, inputs, gated) of the matrices."""
