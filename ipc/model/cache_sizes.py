"""Default sizes of the KV cache, common to the workers and to the planner of topologies."""

from __future__ import annotations

GPU_BLOCK_SIZE, CPU_BLOCK_SIZE = 64, 16
"""Tokens of a KV block, unless the user asks for another number."""
GPU_MARGIN_BYTES = 512 << 20
"""Bytes of a GPU left to the driver, to graphs and to libraries' own buffers, beside the largest
step."""
CPU_CACHE_BYTES = 2 << 30
"""Most bytes of a CPU's cache, unless the user asks for more."""
