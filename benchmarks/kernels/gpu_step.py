"""Measure the time of a step's kernels on a GPU beside the bytes that the step must read.

    python benchmarks/kernels/gpu_step.py [--models qwen3-0.6b llama-3.1-8b]
        [--batches 1 8 64 256] [--context 1024] [--prompts 8] [--drafts 4]
        [--kv-cache-dtypes auto fp8 int8]

It drives the worker's runner in this process, without the engine around it: the step alone. For
each batch size it prints:

- the time of a captured step;
- the floor of its weights, and of its keys, values and states, at the card's measured reading
  speed;
- the kernels that take the time, as the profiler sees them;
- each part of a step beside its own floor, which counts bytes alone. Large products are far from
  it, since arithmetic bounds them.

For each number of prompts it measures a step that computes that many prompts of --context tokens.
With --drafts each row of a batch verifies that many drafts; they are looked up, and hardly any is
right.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.kernels.gpu_step_parts import Kernel, beside_floors, part_times
from benchmarks.workloads import MODELS, write_model
from sidestep.executor.gpu.gpu_runner import GpuRunner
from sidestep.executor.runner.runner import WorkerArgs
from sidestep.ipc.config_sections import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
from sidestep.ipc.model.kv.kv_cache_dtype import AUTO, KV_CACHE_DTYPES, with_kv_cache_dtype
from sidestep.ipc.model.layer_spec import attention_of, recurrent_of
from sidestep.ipc.model.model_spec import ModelSpec, load_model_spec
from sidestep.ipc.transport.slot_columns import empty_tables
from sidestep.ipc.transport.step import StepInput


def read_speed() -> float:
    """Return the bytes a second of a reduction over 4 GiB."""
    data = torch.ones(1 << 31, dtype=torch.bfloat16, device="cuda")
    views = data.view(torch.int64).view(64, -1)
    return data.nbytes / timed(lambda: views.sum(1), 10)


def timed(run: Any, count: int) -> float:
    """Return the seconds of one of `count` runs in a row."""
    run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / count


def make_runner(
    model: str, rows: int, context: int, max_tokens: int, options: dict[str, Any]
) -> GpuRunner:
    """Return a loaded runner of a model with random weights and a random KV cache."""
    path, drafts = write_model(model, tempfile.mkdtemp()), options["drafts"]
    speculative = {"num_speculative_tokens": drafts, "adaptive": False} if drafts else None
    blocks = rows * ((context + 400) // (options["block_size"] or 64) + 2)
    runner = GpuRunner(
        WorkerArgs(
            rank=0,
            spec=with_kv_cache_dtype(load_model_spec(path), options["kv_cache_dtype"]),
            model=ModelConfig(model=path, load_format="dummy"),
            cache=CacheConfig(num_kv_blocks=blocks, block_size=options["block_size"]),
            parallel=ParallelConfig(device="cuda", enforce_eager=options["enforce_eager"]),
            scheduler=SchedulerConfig(
                max_num_seqs=rows,
                max_num_batched_tokens=max_tokens,
                speculative_config=speculative,
            ),
            max_model_len=context + 400,
        )
    )
    assert runner._model.kernels is not None
    with torch.inference_mode():
        for part in runner._model.kernels.attention.cache.parts:
            if options["kv_cache_dtype"] == AUTO:
                part.view(runner._setup.dtype).normal_()
            else:
                # As codes or as scales, these bytes are numbers of ordinary sizes.
                part.view(torch.uint8).random_(0, 64)
    return runner


class Steps:
    """Decode steps of `rows` requests whose context is in the cache already."""

    def __init__(
        self, rows: int, context: int, block_size: int, vocab_size: int, drafts: int = 0
    ) -> None:
        self._rows, self._length, self._block = rows, context, block_size
        self._vocab, self._drafts = vocab_size, drafts
        self._held = 0
        self._next_block = 0
        self._count = 0

    def __next__(self) -> StepInput:
        """Return the next step."""
        rows, first = self._rows, self._count == 0
        needed = -(-(self._length + self._drafts) // self._block) - self._held
        ids = np.arange(self._next_block, self._next_block + needed * rows, dtype=np.int32)
        self._next_block += needed * rows
        self._held += needed
        new = rows if first else 0
        known = self._length
        entering = empty_tables(new)
        for name, values in {
            "slot": np.arange(new),
            "num_known": known,
            "num_prompt": known,
            "num_computed": known - 1,
            "num_sent": known,
            "max_total": known + 400,
            "temperature": 0.6,
            "seed": np.arange(new),
            "max_drafts": self._drafts,
            # Only recurrent layers look at it.
            "state": np.arange(new),
        }.items():
            entering[name] = values
        slots = np.arange(rows, dtype=np.int32)
        step = StepInput(
            step_id=self._count,
            slots=slots,
            num_tokens=np.ones(rows, np.int32),
            num_new_blocks=np.full(rows, needed, np.int32),
            block_ids=ids,
            entering=entering,
            new_token_ids=np.random.default_rng(0)
            .integers(0, self._vocab, new * known)
            .astype(np.int32),
            new_stop_ids=np.empty(0, np.int32),
            new_controls=np.empty(0, np.uint8),
            num_drafts=self._drafts,
        )
        self._length += 1
        self._count += 1
        return step


class PromptSteps(Steps):
    """Steps that compute `rows` prompts of `context` tokens, the same ones again and again."""

    _number = -1

    def __next__(self) -> StepInput:
        number = self._number = self._number + 1
        self._count = self._next_block = self._held = 0
        step = super().__next__()
        self._length -= 1
        step.entering["num_computed"] = 0
        lengths = step.entering["num_known"].astype(np.int32)
        return dataclasses.replace(step, step_id=number, num_tokens=lengths)


def step_time(runner: GpuRunner, steps: Steps, count: int = 40) -> float:
    """Return the seconds of a step with another one always queued behind it."""
    flying = [runner.execute(next(steps)) for _ in range(2)]
    for _ in range(4):
        flying.pop(0).wait()
        flying.append(runner.execute(next(steps)))
    flying.pop(0).wait()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        flying.append(runner.execute(next(steps)))
        flying.pop(0).wait()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / count


def trace(runner: GpuRunner, steps: Steps, count: int) -> list[Kernel]:
    """Return the device's activities in `count` steps, each with another one queued behind it.

    Times are in microseconds.
    """
    from torch.profiler import DeviceType, ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        flying = [runner.execute(next(steps))]
        for _ in range(count - 1):
            flying.append(runner.execute(next(steps)))
            flying.pop(0).wait()
        flying.pop().wait()
    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in profiled.events()
        if event.device_type == DeviceType.CUDA
    ]


def by_name(kernels: list[Kernel], count: int) -> dict[str, tuple[float, float]]:
    """Return the microseconds and launches of each kernel in one step, the longest first."""
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for kernel in kernels:
        entry = found[short_name(kernel.name)]
        entry[0] += (kernel.end - kernel.start) / count
        entry[1] += 1 / count
    return {
        name: (time, launches)
        for name, (time, launches) in sorted(found.items(), key=lambda item: -item[1][0])
    }


def short_name(name: str) -> str:
    """Return a kernel's name without arguments and return type, at most 70 characters."""
    return name.split("(")[0].replace("void ", "")[:70]


def floors(spec: ModelSpec, rows: int, context: int, speed: float) -> dict[str, float]:
    """Return the microseconds to read once the memory that each part of a step reads.

    It is the weights, or every row's keys and values, and its states of recurrent layers; of
    experts, those that as many rows choose on average.
    """
    kv = sum(mixer.kv().token_bytes(2) for mixer in attention_of(spec.layers))
    states = sum(mixer.state_bytes(2) for mixer in recurrent_of(spec.layers))
    read = defaultdict(float, attention=float((kv * context + states) * rows))
    for index, layer in enumerate(spec.layers):
        for matrix in layer.matrices(spec.hidden_size):
            name = f"model.layers.{index}.{matrix.name}"
            scheme = matrix.scheme
            if scheme is None and spec.quantization is not None and matrix.may_be_coded:
                scheme = spec.quantization.scheme(name)
            size = matrix.num_bytes(scheme, 2)
            read[part_of(matrix.name)] += size * (1 - (1 - float(matrix.active)) ** rows)
    read["lm_head"] = 2.0 * spec.vocab_size * spec.hidden_size
    return {part: size / speed * 1e6 for part, size in read.items()}


def part_of(name: str) -> str:
    """Return the part of a step that a matrix of a layer belongs to."""
    for part, words in _WORDS.items():
        if any(word in name for word in words):
            return part
    return "other weights"


_WORDS = {
    "experts": ("expert",),
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}


def part_lines(kernels: list[Kernel], bounds: dict[str, float], seconds: float) -> list[str]:
    """Return lines with each part beside its floor, or the reason why the trace does not tell."""
    try:
        return beside_floors(part_times(kernels), bounds, seconds * 1e6)
    except ValueError as error:
        return [f"    no parts: {error}"]


def report(
    model: str,
    runner: GpuRunner,
    rows: int,
    args: argparse.Namespace,
    speed: float,
    *,
    prompts: bool,
) -> None:
    """Print one step's time, floors, kernels and parts."""
    traced = 4
    drafts = 0 if prompts else args.drafts
    steps = (PromptSteps if prompts else Steps)(
        rows, args.context, runner.ready.block_size, 1000, drafts
    )
    seconds = step_time(runner, steps, 12 if prompts else 40)
    bounds = floors(runner._setup.args.spec, rows, args.context, speed)
    weights = sum(bounds.values()) - bounds["attention"]
    kernels = trace(runner, steps, traced)
    listed = by_name(kernels, traced)
    busy = sum(time for time, _ in listed.values())
    what = "prompts" if prompts else f"{drafts} drafts, batch" if drafts else "batch"
    print(
        f"\n{model}, {what} {rows}, context {args.context}: step {seconds * 1e3:.3f} ms; "
        f"floors: weights {weights / 1e3:.3f}, "
        f"keys, values and states {bounds['attention'] / 1e3:.3f}; kernels' times together "
        f"{busy / 1e3:.3f}"
    )
    for name, (time, launches) in list(listed.items())[: args.top]:
        print(f"  {time:9.1f} us  {launches:5.0f} x {time / launches:8.2f}  {name}")
    if not prompts:
        print("\n".join(part_lines(kernels, bounds, seconds)))


def report_model(model: str, kv_cache_dtype: str, args: argparse.Namespace, speed: float) -> None:
    """Print the steps of a model that is loaded once."""
    most = max([*args.batches, *args.prompts])
    options = {
        "block_size": args.block_size,
        "enforce_eager": args.eager,
        "drafts": args.drafts,
        "kv_cache_dtype": kv_cache_dtype,
    }
    if kv_cache_dtype != AUTO:
        print(f"\nkeys and values as {kv_cache_dtype}:")
    tokens = max(2048, args.context * max(args.prompts, default=0))
    runner = make_runner(model, most, args.context, tokens, options)
    for rows in args.batches:
        report(model, runner, rows, args, speed, prompts=False)
    for rows in args.prompts:
        report(model, runner, rows, args, speed, prompts=True)
    del runner
    torch.cuda.empty_cache()


def main() -> None:
    """Report the chosen models, batches and prompts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--prompts", nargs="*", type=int, default=[])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--drafts", type=int, default=0, help="of each row of a batch")
    parser.add_argument("--block-size", type=int)
    parser.add_argument(
        "--kv-cache-dtypes", nargs="+", default=[AUTO], choices=list(KV_CACHE_DTYPES)
    )
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--top", type=int, default=14, help="kernels to print")
    args = parser.parse_args()
    speed = read_speed()
    print(f"reading: {speed / 1e12:.2f} TB/s")
    for model, dtype in itertools.product(args.models, args.kv_cache_dtypes):
        report_model(model, dtype, args, speed)


if __name__ == "__main__":
    main()
