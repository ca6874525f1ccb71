"""How many KV blocks a rank can have."""

from __future__ import annotations

import os

import torch

from sidestep.executor.attention.base import AttentionShape
from sidestep.executor.runner import WorkerArgs
from sidestep.ipc.errors import EngineStartError

_CPU_LIMIT = 2 << 30


def num_kv_blocks(args: WorkerArgs, shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> int:
    """What was asked for, or what memory allows; never more than all slots at full length could use. The model has been
    loaded already. Raises EngineStartError when not even one block fits."""
    if args.cache.num_kv_blocks is not None:
        return args.cache.num_kv_blocks
    block_bytes = shape.bytes_per_token(dtype) * args.cache.block_size
    budget = args.cache.kv_cache_memory_bytes
    if budget is None:
        budget = _gpu_budget(args, device) if device.type == "cuda" else min(_CPU_LIMIT, _physical_memory() // 4)
    useful = args.max_num_seqs * -(-args.max_model_len // args.cache.block_size)
    blocks = min(budget // block_bytes, useful)
    if blocks < 1:
        raise EngineStartError(
            f"kv_cache_memory_bytes: {budget} bytes do not hold one block of {args.cache.block_size} tokens "
            f"({block_bytes} bytes); raise it, raise gpu_memory_utilization, or lower block_size")
    return blocks


def _gpu_budget(args: WorkerArgs, device: torch.device) -> int:
    """What the wanted share of the GPU leaves beside the weights and the activations of the largest step."""
    free, total = torch.cuda.mem_get_info(device)
    spec, itemsize = args.spec, 4
    widest = max(spec.hidden_size * 6 + 3 * spec.intermediate_size, spec.num_heads * spec.head_dim * 8)
    activations = args.max_num_batched_tokens * widest * itemsize
    # Sampling holds several float32 (and int64) copies of the logits of all rows.
    logits = args.max_num_seqs * spec.vocab_size * itemsize * 10
    return int(max(0, free - (1 - args.cache.gpu_memory_utilization) * total - activations - logits))


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
