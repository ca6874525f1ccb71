"""The number of KV blocks that a rank can have."""

from __future__ import annotations

import os

from sidestep.executor.runner.runner import WorkerArgs
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.config_sections import StepLimits
from sidestep.ipc.model.cache_sizes import CPU_CACHE_BYTES

_CPU_TOKENS = 128
"""Tokens of each request that may run at once, for which a CPU's cache is sized by default. Sized
by `CPU_CACHE_BYTES` alone, the cache of a small model would be a hundred times as large as the
model."""


def cpu_kv_blocks(
    args: WorkerArgs, limits: StepLimits, bytes_per_token: int, block_size: int
) -> int:
    """Return the number of KV blocks for a CPU.

    It is the number that was asked for, or enough blocks for one request of full length and for
    many short ones, within a share of the machine's memory. Raises EngineStartError when not one
    block fits.
    """
    share = _physical_memory() // (4 * args.parallel.data_parallel_size)
    tokens = max(args.max_model_len, _CPU_TOKENS * limits.max_num_seqs)
    enough = -(-tokens // block_size) * block_size * bytes_per_token
    return _blocks(
        args,
        limits,
        bytes_per_token,
        block_size,
        min(CPU_CACHE_BYTES, share, enough),
        "raise kv_cache_memory_bytes or lower block_size",
    )


def gpu_kv_blocks(
    args: WorkerArgs,
    limits: StepLimits,
    bytes_per_token: int,
    block_size: int,
    *,
    free: int,
    total: int,
    working: int,
) -> int:
    """Return the number that was asked for, or as many as fit in the wanted share of the GPU.

    free, total: bytes of the GPU, with the model loaded. working: bytes that the largest step needs
    beside it. Raises EngineStartError when not one block fits, and says what to change.
    """
    budget = int(free - (1 - args.cache.gpu_memory_utilization) * total) - working
    gib = 1 << 30
    return _blocks(
        args,
        limits,
        bytes_per_token,
        block_size,
        max(0, budget),
        f"of {total / gib:.1f} GiB, {(total - free) / gib:.1f} are taken by weights and other "
        f"programs and {working / gib:.1f} by the largest step; raise gpu_memory_utilization "
        f"({args.cache.gpu_memory_utilization}), lower max_num_batched_tokens "
        f"({limits.max_num_batched_tokens}) or max_num_seqs ({limits.max_num_seqs}), or "
        "use a larger tensor_parallel_size or pipeline_parallel_size",
    )


def _blocks(
    args: WorkerArgs,
    limits: StepLimits,
    bytes_per_token: int,
    block_size: int,
    budget: int,
    advice: str,
) -> int:
    """Return the number of blocks: never more than all slots at full length could use."""
    if args.cache.num_kv_blocks is not None:
        return args.cache.num_kv_blocks
    block_bytes = bytes_per_token * block_size
    if args.cache.kv_cache_memory_bytes is not None:
        budget, advice = args.cache.kv_cache_memory_bytes, "raise it or lower block_size"
    useful = limits.max_num_seqs * -(-args.max_model_len // block_size)
    blocks = min(budget // block_bytes, useful)
    if blocks < 1:
        raise EngineStartError(
            f"kv_cache_memory_bytes: {budget} bytes do not hold one block of {block_size} tokens "
            f"({block_bytes} bytes); {advice}"
        )
    return blocks


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
