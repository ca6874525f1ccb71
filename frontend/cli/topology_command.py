"""`sidestep topology`, which shows the machine and the parallel sizes that fit a model.

It answers before any engine is started.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import msgspec

from sidestep.frontend.planning.machine import GpuInfo, Machine, this_machine
from sidestep.frontend.planning.topology import Size, sizes
from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.config import with_whole_experts
from sidestep.ipc.config_sections import DEFAULT_MODEL, CacheConfig, ModelConfig
from sidestep.ipc.model.kv.kv_cache_dtype import with_kv_cache_dtype
from sidestep.ipc.model.model_spec import ModelSpec, load_model_spec, resolve_model_path

_GIB = 1 << 30
_FILES = ("config.json", "generation_config.json")


class TopologyReport(msgspec.Struct, frozen=True):
    """The report that --json prints."""

    machine: Machine
    model: str
    dtype: str
    max_model_len: int
    sizes: list[Size]


def run_topology(parsed: argparse.Namespace) -> int:
    """Run `sidestep topology` and return its exit status."""
    model = ModelConfig(
        **_given(parsed, ModelConfig) | {"model": parsed.model_argument or DEFAULT_MODEL}
    )
    cache = CacheConfig(**_given(parsed, CacheConfig))
    machine = imagined(this_machine(), parsed.gpus, parsed.gpu_memory, parsed.bandwidth)
    path = resolve_model_path(model.model, model.revision, _FILES)
    spec = load_model_spec(
        path,
        model.hf_overrides,
        quantization=model.quantization,
        head_quantization=model.head_quantization,
    )
    if getattr(parsed, "enable_expert_parallel", False):
        spec = with_whole_experts(spec)
    spec = with_kv_cache_dtype(spec, cache.kv_cache_dtype, cache.kv_cache_dtype_skip_layers)
    dtype = _dtype(model, spec, machine)
    limit = (
        model.max_model_len
        if isinstance(model.max_model_len, int)
        else spec.max_position_embeddings
    )
    if limit > spec.max_position_embeddings:
        raise ValidationError(
            "max_model_len",
            f"{limit} is more than the model's {spec.max_position_embeddings} positions",
        )
    report = TopologyReport(
        machine,
        model.model,
        dtype,
        limit,
        sizes(spec, machine, dtype=dtype, max_model_len=limit, cache=cache),
    )
    if parsed.json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=1).decode())
    else:
        print("\n".join(lines(report, cache)))
    return 0


def imagined(
    machine: Machine, count: int | None, memory_bytes: int | None, bandwidth: float | None
) -> Machine:
    """Return the machine with other GPUs than it has; raises ValidationError."""
    if count is None and memory_bytes is None and bandwidth is None:
        return machine
    if count is not None and count < 1:
        raise ValidationError("gpus", f"must be at least 1, not {count}")
    if memory_bytes is not None:
        gpu = GpuInfo("imagined GPU", memory_bytes, bandwidth)
    elif machine.gpus:
        gpu = msgspec.structs.replace(
            machine.gpus[0], bandwidth=bandwidth or machine.gpus[0].bandwidth
        )
    else:
        raise ValidationError(
            "gpu_memory", "is needed where there is no GPU whose memory could be meant"
        )
    return Machine(
        [gpu] * (count or len(machine.gpus) or 1), {}, machine.cpu_cores, machine.memory_bytes
    )


def _given(parsed: argparse.Namespace, section: type[ModelConfig | CacheConfig]) -> dict[str, Any]:
    """Return the fields of a section of options that were given as flags."""
    names = [field.name for field in fields(section) if hasattr(parsed, field.name)]
    return {name: getattr(parsed, name) for name in names}


def _dtype(model: ModelConfig, spec: ModelSpec, machine: Machine) -> str:
    """Return the dtype that the workers would choose."""
    if model.dtype != "auto":
        return model.dtype
    return spec.dtype if machine.gpus else "float32"


def lines(report: TopologyReport, cache: CacheConfig) -> list[str]:
    """Return the report as lines for people."""
    made = [
        *_machine_lines(report.machine),
        "",
        f"{report.model}: {report.dtype}, requests of up to {report.max_model_len:,} tokens",
        "",
    ]
    made += _table(report)
    fitting = [size for size in report.sizes if size.fits]
    made.append("")
    if not fitting:
        made.append(
            "No cache holds a request of the full length: more or larger GPUs, or a "
            "smaller --max-model-len, are needed."
        )
    elif report.machine.gpus:
        made.append(f"Most cache: {_flags(max(fitting, key=lambda s: s.cache_tokens_in_all))}")
        if fitting[0].token_floor_ms is not None:
            made.append(
                f"Least time a token: {_flags(min(fitting, key=lambda s: s.token_floor_ms or 0.0))}"
            )
    if any(0 < size.full_requests < size.data_parallel_size for size in report.sizes):
        made.append(
            "A replica whose cache holds less than one full request takes shorter ones "
            "alone; with a --max-model-len that does not fit it does not start."
        )
    if report.machine.gpus:
        made += [
            "Times are floors: what is read from memory, at the bandwidth that its maker states. "
            "Launches, communication and arithmetic come on top.",
            "Cache: what weights and an estimate of the largest step leave of "
            f"{cache.gpu_memory_utilization:.0%} of the memory; the engine measures that step at "
            "its start.",
        ]
    else:
        made.append("For a machine with GPUs: --gpus 8 --gpu-memory 141GiB --bandwidth 4800GB/s")
    return made


def _machine_lines(machine: Machine) -> list[str]:
    made = [f"CPU: {machine.cpu_cores} cores, {machine.memory_bytes / _GIB:.1f} GiB of memory"]
    kinds = {gpu: machine.gpus.count(gpu) for gpu in machine.gpus}
    for gpu, count in kinds.items():
        speed = (
            "bandwidth not known (--bandwidth)"
            if gpu.bandwidth is None
            else f"{gpu.bandwidth / 1e9:,.0f} GB/s"
        )
        made.append(f"GPUs: {count} x {gpu.name}, {gpu.memory_bytes / _GIB:.1f} GiB, {speed}")
    if not kinds:
        made.append("GPUs: none found (nvidia-smi names none)")
    if machine.links:
        made.append(
            "Links: "
            + ", ".join(f"{kind} between {count} pairs" for kind, count in machine.links.items())
        )
    return made


def _table(report: TopologyReport) -> list[str]:
    heads = (
        "TP",
        "PP",
        "DP",
        "weights/rank",
        "cache/replica",
        "cache in all",
        "full requests",
        "ms/token",
        "ms/step, full cache",
    )
    rows = [heads, *(_row(size) for size in report.sizes)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _row(size: Size) -> tuple[str, ...]:
    sizes = (
        str(size.tensor_parallel_size),
        str(size.pipeline_parallel_size),
        str(size.data_parallel_size),
    )
    weights = f"{size.weight_bytes / _GIB:.1f} GiB"
    cache = (
        f"{size.cache_tokens:,}",
        f"{size.cache_tokens_in_all:,}",
        f"{size.full_requests:,.1f}",
    )
    if not size.cache_tokens:
        return (*sizes, weights, "does not fit", "", "", "", "")
    return (*sizes, weights, *cache, _ms(size.token_floor_ms), _ms(size.full_step_floor_ms))


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _flags(size: Size) -> str:
    named: Sequence[tuple[str, int]] = (
        ("tensor", size.tensor_parallel_size),
        ("pipeline", size.pipeline_parallel_size),
        ("data", size.data_parallel_size),
    )
    return (
        " ".join(f"--{name}-parallel-size {value}" for name, value in named if value > 1)
        or "one GPU"
    )
