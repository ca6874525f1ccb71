"""The parallel sizes that fit a model on a machine, with the memory and time of each.

A size has the weights of a rank, the tokens in the cache, and the least time of a step. All numbers
come from arithmetic on the model's shape: nothing is loaded and no GPU is asked. Times are lower
bounds: the bytes that must be read from memory, divided by the memory's bandwidth. Launches,
communication and arithmetic come on top.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from sidestep.frontend.planning.machine import Machine
from sidestep.frontend.planning.weight_size import weight_size
from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.config import check_tensor_parallel
from sidestep.ipc.config_sections import CacheConfig, SchedulerConfig
from sidestep.ipc.model.cache_groups import cache_groups
from sidestep.ipc.model.cache_sizes import (
    CPU_BLOCK_SIZE,
    CPU_CACHE_BYTES,
    GPU_BLOCK_SIZE,
    GPU_MARGIN_BYTES,
)
from sidestep.ipc.model.kv.kv_layout import KvLayout, kv_layout
from sidestep.ipc.model.layer_split import Stage, split_layers, stage_of, why_one_stage
from sidestep.ipc.model.model_size import (
    layers_size,
)
from sidestep.ipc.model.model_spec import ModelSpec

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """One combination of parallel sizes; bytes are those of the rank with the most."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    weight_bytes: int
    working_bytes: int
    """Estimated bytes for the largest step."""
    cache_tokens: int
    """Tokens in the cache of one replica; 0 if the model does not fit."""
    cache_tokens_in_all: int
    full_requests: float
    """Requests of the model's full length that the caches of all replicas hold together."""
    token_floor_ms: float | None
    """Least milliseconds for one token of a request that runs alone.

    None if the bandwidth is not known.
    """
    full_step_floor_ms: float | None
    """Least milliseconds of a decode step over a cache that is full.

    None if the bandwidth is not known or there is no cache.
    """

    @property
    def fits(self) -> bool:
        """Whether a request of the model's full length can run."""
        return self.full_requests >= self.data_parallel_size


def sizes(
    spec: ModelSpec, machine: Machine, *, dtype: str, max_model_len: int, cache: CacheConfig
) -> list[Size]:
    """Return every size of a replica that the model and the machine allow.

    Each comes with the largest number of replicas that the devices allow.
    """
    num_devices = max(1, len(machine.gpus))
    return [
        _size(
            spec, machine, tp, pp, num_devices // (tp * pp), ITEM_BYTES[dtype], max_model_len, cache
        )
        for tp, pp in _replica_sizes(spec, num_devices)
    ]


def _replica_sizes(spec: ModelSpec, num_devices: int) -> Iterator[tuple[int, int]]:
    """Yield the tensor and pipeline parallel sizes that use all devices."""
    for tp in range(1, num_devices + 1):
        try:
            check_tensor_parallel(spec, tp)
        except ValidationError:
            continue
        stages = 1 if why_one_stage(spec) is not None else spec.num_layers
        for pp in range(1, min(stages, num_devices // tp) + 1):
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
    """Return the numbers for one combination of parallel sizes.

    item: bytes of a number.
    """
    layers = split_layers(spec, pp)
    # A GPU multiplies with codes; a CPU may do so with the numbers that they stand for.
    codes = bool(machine.gpus)
    kept = item if machine.gpus else _bytes_on_cpu(spec, item)
    stages = [
        Shard(spec, tp, stage_of(layers, i), max_model_len, itemsize=kept, keeps_codes=codes)
        for i in range(pp)
    ]
    working = _working_bytes(spec, tp, item) if machine.gpus else 0
    room = [_room(machine, cache) - stage.weights - working for stage in stages]
    if not machine.gpus:
        room = [min(one, CPU_CACHE_BYTES, machine.memory_bytes // 4) for one in room]
    limits = SchedulerConfig().limits("cuda" if machine.gpus else "cpu", layers=spec.layers)
    block_size = cache.block_size or (GPU_BLOCK_SIZE if machine.gpus else CPU_BLOCK_SIZE)
    # A stage of recurrent layers alone has no keys and values.
    block_bytes = [stage.kv_layout(item, block_size).block_bytes for stage in stages]
    blocks = min(
        max(0, bytes_left) // size
        for size, bytes_left in zip(block_bytes, room, strict=True)
        if size
    )
    # The tokens of requests of full length: shorter ones have blocks in all groups for all tokens.
    full = -(-max_model_len // block_size) * block_size
    own = cache_groups(spec.layers, max_model_len).blocks_of(
        full, block_size, limits.max_tokens_ahead
    )
    tokens = min(blocks * full // own, limits.max_num_seqs * max_model_len)
    tokens -= tokens % block_size
    bandwidth = min((gpu.bandwidth or 0.0 for gpu in machine.gpus), default=0.0)
    read, cached = (
        sum(s.read for s in stages),
        sum(block_bytes) * (tokens * own // full),
    )
    return Size(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        data_parallel_size=dp,
        weight_bytes=max(stage.weights for stage in stages),
        working_bytes=working,
        cache_tokens=tokens,
        cache_tokens_in_all=tokens * dp,
        full_requests=round(tokens * dp / max_model_len, 2),
        token_floor_ms=1e3 * read / bandwidth if bandwidth else None,
        full_step_floor_ms=1e3 * (read + cached) / bandwidth if bandwidth and tokens else None,
    )


def _bytes_on_cpu(spec: ModelSpec, item: int) -> int:
    """Return the bytes of a weight on a CPU, whose kernels in C keep a file's 16 bits.

    item: bytes of a number in the run's type. Quantized weights count as their numbers.
    """
    plain = spec.quantization is None or spec.quantization.is_empty
    return min(item, ITEM_BYTES.get(spec.dtype, item)) if plain else item


class Shard:
    """One rank's part of the model."""

    def __init__(
        self,
        spec: ModelSpec,
        tp: int,
        stage: Stage,
        max_model_len: int | None = None,
        *,
        itemsize: int = 1,
        keeps_codes: bool = False,
    ) -> None:
        """Count the rank's part.

        max_model_len: tokens of the longest request, if it is bounded. itemsize: bytes of a weight
        that is not quantized; 1 counts numbers. keeps_codes: see weight_size.
        """
        layers = spec.layers[stage.layers.start : stage.layers.stop]
        size = weight_size(spec, tp, stage, itemsize, keeps_codes=keeps_codes)
        self.weights = size.held
        """Bytes of all weights."""
        self.read = size.read
        """Bytes of weights that a step reads at least."""
        self._kv = spec, tp, layers, max_model_len

    def kv_layout(self, itemsize: int, block_size: int) -> KvLayout:
        """Return the rank's KV blocks. itemsize: bytes of a number of the model's type."""
        return kv_layout(*self._kv, itemsize=itemsize, block_size=block_size)


def _room(machine: Machine, cache: CacheConfig) -> int:
    """Return the bytes of one device that the engine may use."""
    if not machine.gpus:
        return machine.memory_bytes
    return int(min(gpu.memory_bytes for gpu in machine.gpus) * cache.gpu_memory_utilization)


def _working_bytes(spec: ModelSpec, tp: int, item: int) -> int:
    """Return an estimate of the bytes that the largest step takes on a GPU.

    It counts the activations of the MLP and of the residual stream, and the logits, once outside of
    graphs and once in them. The engine measures the true number at its start.
    """
    limits = SchedulerConfig().limits("cuda", layers=spec.layers)
    step = (
        limits.max_num_batched_tokens * (layers_size(spec, tp).widest + 4 * spec.hidden_size) * item
    )
    step += limits.max_num_seqs * spec.vocab_size * item
    return 2 * step + GPU_MARGIN_BYTES
