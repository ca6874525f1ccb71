"""The number of KV blocks that a rank can have."""

from __future__ import annotations

import os

from sidestep.executor.runner.runner import WorkerArgs
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.model.cache_sizes import CPU_CACHE_BYTES
from sidestep.ipc.model.kv.kv_layout import KvLayout
from sidestep.ipc.model.layer_spec import recurrent_of
from sidestep.ipc.step_limits import StepLimits

_CPU_TOKENS = 128
"""Tokens of each request that may run at once, for which a CPU's cache is sized by default. Sized
by `CPU_CACHE_BYTES` alone, the cache of a small model would be a hundred times as large as the
model."""


def cpu_kv_blocks(args: WorkerArgs, limits: StepLimits, layout: KvLayout) -> int:
    """Return the number of KV blocks for a CPU.

    It is the number that was asked for, or enough blocks for one request of full length and for
    many short ones, within a share of the machine's memory. Raises EngineStartError when not one
    block fits.
    """
    share = _physical_memory() // (4 * args.parallel.most_replicas)
    tokens = max(args.max_model_len, _CPU_TOKENS * limits.max_num_seqs)
    enough = args.cache_groups.most_blocks(tokens, layout.block_size) * layout.block_bytes
    return _blocks(
        args,
        limits,
        layout,
        min(CPU_CACHE_BYTES, share, enough),
        "raise kv_cache_memory_bytes or lower block_size",
    )


def cpu_states(args: WorkerArgs, limits: StepLimits, itemsize: int) -> int:
    """Return the number of states of recurrent layers for a CPU.

    They may take as much memory as the KV cache. itemsize: bytes of a value of the model's type.
    Raises EngineStartError as `_states` does.
    """
    share = _physical_memory() // (4 * args.parallel.most_replicas)
    budget = min(CPU_CACHE_BYTES, share)
    return _states(args, limits, itemsize, budget, "raise it")


def gpu_states(
    args: WorkerArgs,
    limits: StepLimits,
    itemsize: int,
    *,
    free: int,
    total: int,
    working: int,
) -> int:
    """Return the number of states of recurrent layers for a GPU.

    They may take half of what is left for the cache, or as much as was asked for. See `cpu_states`
    and `gpu_kv_blocks`.
    """
    budget = max(0, _gpu_budget(args, free, total, working) // 2)
    advice = _gpu_advice(args, limits, free, total, working)
    return _states(args, limits, itemsize, budget, advice)


def state_bytes(args: WorkerArgs, limits: StepLimits, itemsize: int) -> int:
    """Return the size of a rank's state of a sequence; 0 without recurrent layers."""
    ranks = args.parallel.tensor_parallel_size
    one = sum(spec.state_bytes(itemsize, ranks) for spec in recurrent_of(args.stage_layers))
    return one * limits.state_width


def _states(args: WorkerArgs, limits: StepLimits, itemsize: int, budget: int, advice: str) -> int:
    """Return the number of states: never more than are of use.

    budget: bytes that they may take if no size of the cache was asked for. Raises EngineStartError
    for fewer than two, since a request may begin from a checkpoint.
    """
    size = max(1, state_bytes(args, limits, itemsize))
    if args.cache.kv_cache_memory_bytes is not None:
        budget, advice = args.cache.kv_cache_memory_bytes, "raise it"
    count = min(limits.most_states, budget // size)
    if count < 2:
        raise EngineStartError(
            f"kv_cache_memory_bytes: {budget} bytes do not hold two states of the recurrent layers "
            f"({size} bytes each); {advice}"
        )
    return count


def gpu_kv_blocks(
    args: WorkerArgs,
    limits: StepLimits,
    layout: KvLayout,
    *,
    free: int,
    total: int,
    working: int,
    states: int = 0,
) -> int:
    """Return the number that was asked for, or as many as fit in the wanted share of the GPU.

    free, total: bytes of the GPU, with the model loaded. working: bytes that the largest step needs
    beside it. states: bytes of the states of recurrent layers. Raises EngineStartError when not one
    block fits, and says what to change.
    """
    return _blocks(
        args,
        limits,
        layout,
        max(0, _gpu_budget(args, free, total, working) - states),
        _gpu_advice(args, limits, free, total, working, states),
    )


def _gpu_budget(args: WorkerArgs, free: int, total: int, working: int) -> int:
    """Return the bytes that are left for the cache, with the states of recurrent layers."""
    return int(free - (1 - args.cache.gpu_memory_utilization) * total) - working


def _gpu_advice(
    args: WorkerArgs, limits: StepLimits, free: int, total: int, working: int, states: int = 0
) -> str:
    """Return where a GPU's memory is, and what to change."""
    gib = 1 << 30
    of_states = f", {states / gib:.1f} by states of recurrent layers" if states else ""
    return (
        f"of {total / gib:.1f} GiB, {(total - free) / gib:.1f} are taken by weights and other "
        f"programs{of_states} and {working / gib:.1f} by the largest step; raise "
        f"gpu_memory_utilization ({args.cache.gpu_memory_utilization}), lower "
        f"max_num_batched_tokens ({limits.max_num_batched_tokens}) or max_num_seqs "
        f"({limits.max_num_seqs}), or use a larger tensor_parallel_size or pipeline_parallel_size"
    )


def _blocks(
    args: WorkerArgs,
    limits: StepLimits,
    layout: KvLayout,
    budget: int,
    advice: str,
) -> int:
    """Return the number of blocks: never more than all slots at full length could use."""
    if args.cache.num_kv_blocks is not None:
        return args.cache.num_kv_blocks
    block_size, block_bytes = layout.block_size, layout.block_bytes
    if args.cache.kv_cache_memory_bytes is not None:
        budget, advice = args.cache.kv_cache_memory_bytes, "raise it or lower block_size"
    useful = limits.max_num_seqs * args.cache_groups.most_blocks(args.max_model_len, block_size)
    # A stage of recurrent layers alone has nothing in its blocks.
    blocks = min(budget // block_bytes, useful) if block_bytes else useful
    if blocks < 1:
        raise EngineStartError(
            f"kv_cache_memory_bytes: {budget} bytes do not hold one block of {block_size} tokens "
            f"({block_bytes} bytes); {advice}"
        )
    return blocks


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
