"""Which parallel sizes fit a model on a machine: weights of a rank, tokens in the cache, and the
least time of a step.

All by arithmetic on the model's shape: nothing is loaded and no GPU is asked. Times are floors:
what must be read from memory, by the memory's bandwidth; launches, communication and arithmetic
come on top.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from sidestep.frontend.planning.machine import Machine
from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.config import check_tensor_parallel
from sidestep.ipc.config_sections import CacheConfig, SchedulerConfig
from sidestep.ipc.model.layer_split import Stage, split_layers, stage_of
from sidestep.ipc.model.model_spec import ModelSpec

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_GPU_BLOCK, _CPU_BLOCK = 64, 16
"""Tokens of a KV block, unless told otherwise."""
_MARGIN = 512 << 20
"""What the engine leaves free on a GPU beside the largest step; see executor/gpu/gpu_runner.py."""
_CPU_CACHE_BYTES = 2 << 30
"""Most that the engine takes for the cache on a CPU unless told otherwise; see
executor/runner/kv_cache_size.py."""


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of parallel sizes. Bytes are of the rank that has most."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    weight_bytes: int
    working_bytes: int
    """For the largest step, estimated."""
    cache_tokens: int
    """Of one replica; 0 if it does not fit."""
    cache_tokens_in_all: int
    full_requests: float
    """Requests of the model's full length that the caches of all replicas hold together."""
    token_floor_ms: float | None
    """One token of a request that is alone; None if the bandwidth is not known."""
    full_step_floor_ms: float | None
    """A decode step over a cache that is full."""

    @property
    def fits(self) -> bool:
        """Whether a request of the model's full length can run."""
        return self.full_requests >= self.data_parallel_size


def sizes(
    spec: ModelSpec, machine: Machine, *, dtype: str, max_model_len: int, cache: CacheConfig
) -> list[Size]:
    """Every size of a replica that the model and the machine allow, with as many replicas as there
    is room for.
    """
    num_devices = max(1, len(machine.gpus))
    return [
        _size(
            spec, machine, tp, pp, num_devices // (tp * pp), ITEM_BYTES[dtype], max_model_len, cache
        )
        for tp, pp in _replica_sizes(spec, num_devices)
    ]


def _replica_sizes(spec: ModelSpec, num_devices: int) -> Iterator[tuple[int, int]]:
    """Tensor and pipeline parallel sizes."""
    for tp in range(1, num_devices + 1):
        try:
            check_tensor_parallel(spec, tp)
        except ValidationError:
            continue
        for pp in range(1, min(spec.num_layers, num_devices // tp) + 1):
            if num_devices // (tp * pp) * tp * pp == num_devices:
                yield tp, pp


def _size(
    spec: ModelSpec,
    machine: Machine,
    tp: int,
    pp: int,
    dp: int,
    item: int,
    max_model_len: int,
    cache: CacheConfig,
) -> Size:
    """item: bytes of a number."""
    layers = split_layers(spec, pp)
    stages = [Shard(spec, tp, stage_of(layers, i)) for i in range(pp)]
    working = _working_bytes(spec, tp, item) if machine.gpus else 0
    tokens = max(
        0,
        min(
            (_room(machine, cache) - stage.weights * item - working) // (stage.kv_per_token * item)
            for stage in stages
        ),
    )
    if not machine.gpus:
        tokens = min(
            tokens,
            min(_CPU_CACHE_BYTES, machine.memory_bytes // 4) // (stages[0].kv_per_token * item),
        )
    tokens = min(
        tokens,
        SchedulerConfig().limits("cuda" if machine.gpus else "cpu").max_num_seqs * max_model_len,
    )
    tokens -= tokens % (cache.block_size or (_GPU_BLOCK if machine.gpus else _CPU_BLOCK))
    bandwidth = min((gpu.bandwidth or 0.0 for gpu in machine.gpus), default=0.0)
    read, kept = (
        sum(s.read for s in stages) * item,
        sum(s.kv_per_token for s in stages) * item * tokens,
    )
    return Size(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        data_parallel_size=dp,
        weight_bytes=max(stage.weights for stage in stages) * item,
        working_bytes=working,
        cache_tokens=tokens,
        cache_tokens_in_all=tokens * dp,
        full_requests=round(tokens * dp / max_model_len, 2),
        token_floor_ms=1e3 * read / bandwidth if bandwidth else None,
        full_step_floor_ms=1e3 * (read + kept) / bandwidth if bandwidth and tokens else None,
    )


class Shard:
    """What one rank has of the model; counts of numbers, not bytes."""

    def __init__(self, spec: ModelSpec, tp: int, stage: Stage) -> None:
        num_layers, first, last = len(stage.layers), stage.is_first, stage.is_last
        hidden, dim = spec.hidden_size, spec.head_dim
        heads, kv_heads, width = (
            spec.num_heads // tp,
            max(1, spec.num_kv_heads // tp),
            spec.intermediate_size // tp,
        )
        attention = hidden * dim * (2 * heads + 2 * kv_heads) + 2 * dim * spec.qk_norm
        attention += (
            spec.attention_bias * dim * (heads + 2 * kv_heads) + spec.attention_output_bias * hidden
        )
        mlp = 3 * hidden * width + spec.mlp_bias * (2 * width + hidden)
        table = -(-spec.vocab_size // tp) * hidden
        layers = num_layers * (attention + mlp + 2 * hidden)
        shares_table = first and last and spec.tie_word_embeddings
        self.weights = layers + first * table + last * (hidden + (0 if shares_table else table))
        self.read = layers + last * (hidden + table)
        """What a step reads at least: of the embedding only the rows of its tokens."""
        self.kv_per_token = 2 * num_layers * kv_heads * dim


def _room(machine: Machine, cache: CacheConfig) -> int:
    """Bytes of one device that the engine may use."""
    if not machine.gpus:
        return machine.memory_bytes
    return int(min(gpu.memory_bytes for gpu in machine.gpus) * cache.gpu_memory_utilization)


def _working_bytes(spec: ModelSpec, tp: int, item: int) -> int:
    """An estimate of what the largest step takes on a GPU: the MLP's and the stream's activations
    and the logits, once outside of graphs and once in them. The engine measures it at its start.
    """
    limits = SchedulerConfig().limits("cuda")
    step = (
        limits.max_num_batched_tokens
        * (3 * spec.intermediate_size // tp + 4 * spec.hidden_size)
        * item
    )
    step += limits.max_num_seqs * spec.vocab_size * item
    return 2 * step + _MARGIN
