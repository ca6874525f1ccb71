"""Measure the time that controls of logits add to a decode step, beside the same step without any.

    python benchmarks/engine/controls.py [--models qwen3-0.6b llama-3.1-8b] [--rows 64 256]
        [--context 1024]
    python benchmarks/engine/controls.py --device cpu [--rows 8 32] [--context 64]

Everything is measured in one run. For each model (on a CPU the bundled one) and batch, print the
time of a step without controls. The other figures are ratios to it: the same step in a runner
without the code for special rows, and after requests with controls have run and gone; and, for each
kind of control, a step where one row in eight asks for it, and where all do. Rounds of all of them
alternate, and the fastest round of each counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.kernels.gpu_step import Steps, make_runner
from benchmarks.workloads import MODELS
from sidestep import DEFAULT_MODEL
from sidestep.executor.cpu.cpu_runner import ModelRunner
from sidestep.executor.gpu.gpu_runner import GpuRunner
from sidestep.executor.runner.input_batch import HostBatch
from sidestep.executor.runner.runner import WorkerArgs
from sidestep.executor.sampling.special_rows import SpecialRows
from sidestep.ipc.config_sections import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
from sidestep.ipc.model.model_spec import load_model_spec
from sidestep.ipc.params.logits_controls import Controls, encode_controls
from sidestep.ipc.transport.step import StepInput, StepMasks

KINDS = {
    "logprobs=0": Controls(logprobs=0),
    "logprobs=5": Controls(logprobs=5),
    "logprobs=20": Controls(logprobs=20),
    "logit_bias of 10": Controls(logit_bias={i: 0.5 for i in range(10)}),
    "allowed_token_ids, 100": Controls(allowed_token_ids=list(range(100))),
    "penalties": Controls(presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1),
    "bad_words, 10": Controls(bad_words=[[i, i + 1, i + 2] for i in range(10)]),
    "a grammar": Controls(has_grammar=True),
}
ROUNDS, COUNT = 5, 25


class ControlledSteps(Steps):
    """Decode steps whose first `asking` requests have controls."""

    def __init__(
        self,
        rows: int,
        context: int,
        block_size: int,
        vocab_size: int,
        controls: Controls,
        asking: int,
    ) -> None:
        super().__init__(rows, context, block_size, vocab_size)
        self._asked = encode_controls(controls)
        self._asking = asking
        self._awaits_masks = int(controls.has_grammar)

    def __next__(self) -> StepInput:
        """Return the next step."""
        step = super().__next__()
        entering = step.entering.copy()
        entering["num_control_bytes"][: self._asking] = len(self._asked)
        asking = min(self._asking, len(entering))
        return dataclasses.replace(
            step,
            entering=entering,
            awaits_masks=self._awaits_masks,
            new_controls=np.frombuffer(self._asked * asking, np.uint8),
        )

    def masks(self, step: StepInput) -> StepMasks:
        """Return masks for the requests that have a grammar; all masks are the same."""
        rows, none = np.arange(self._asking, dtype=np.int32), np.empty(0, np.int32)
        return StepMasks(step.step_id, 0, rows, np.zeros_like(rows), none)


class NoSpecialRows(SpecialRows):
    """Stand-in for a runner without any code for special rows."""

    def __init__(self) -> None:
        pass

    def enter(self, step: StepInput) -> None:
        """Ignore the step's new requests."""

    def find(self, batch: HostBatch) -> None:
        """Find no special row."""
        return None

    def find_prompts(self, batch: HostBatch) -> None:
        """Find no prompt with controls."""
        return None


def make_cpu_runner(rows: int, context: int) -> ModelRunner:
    """Return a loaded runner of the bundled model."""
    spec = load_model_spec(DEFAULT_MODEL)
    blocks = rows * (-(-(context + 400) // 16) + 2)
    runner = ModelRunner(
        WorkerArgs(
            rank=0,
            spec=spec,
            model=ModelConfig(),
            cache=CacheConfig(num_kv_blocks=blocks),
            parallel=ParallelConfig(device="cpu"),
            max_model_len=context + 400,
            scheduler=SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=max(rows, 2048)),
        )
    )
    return runner


def step_time(runner: GpuRunner | ModelRunner, steps: ControlledSteps) -> float:
    """Return the seconds of a step.

    On a GPU another step is always queued behind it. On a CPU they are the seconds of its one
    thread, so that other programs do not count.
    """
    clock = time.perf_counter if isinstance(runner, GpuRunner) else time.thread_time

    def launch() -> object:
        step = next(steps)
        return runner.execute(step, lambda: steps.masks(step))

    flying = [launch() for _ in range(2)]
    begin = 0.0
    for number in range(4 + COUNT):
        if number == 4:
            begin = clock()
        flying.pop(0).wait()  # type: ignore[attr-defined]
        flying.append(launch())
    seconds = (clock() - begin) / COUNT
    for pending in flying:
        pending.wait()  # type: ignore[attr-defined]
    return seconds


class Case:
    """One runner and batch."""

    def __init__(self, runner: GpuRunner | ModelRunner, rows: int, context: int) -> None:
        self._runner, self._rows = runner, rows
        self._shape = (rows, context, runner.ready.block_size, 1000)
        assert runner._last is not None
        self._last: Any = runner._last
        self._special: Any = runner._last.special

    @torch.inference_mode()
    def seconds(self, controls: Controls, asking: int) -> float:
        """Return the seconds of a step in which `asking` rows have controls."""
        return step_time(self._runner, ControlledSteps(*self._shape, controls, asking))

    def without_code(self) -> float:
        """Return the seconds of a step without controls in a runner that knows none."""
        self._last.special = NoSpecialRows()
        try:
            return self.seconds(Controls(), 0)
        finally:
            self._last.special = self._special

    def after_others(self) -> float:
        """Return the seconds of a step without controls, after requests in other slots had some.

        The runner has no message that those requests are gone.
        """
        special = self._special
        special._known[self._rows :] = True
        special._count = int(special._known.sum())
        try:
            return self.seconds(Controls(), 0)
        finally:
            special._known[self._rows :] = False
            special._count = int(special._known.sum())


def report(name: str, runner: GpuRunner | ModelRunner, rows: int, context: int) -> None:
    """Measure and print one model and batch."""
    case = Case(runner, rows, context)
    measured: dict[tuple[str, int], Callable[[], float]] = {
        ("plain", 0): lambda: case.seconds(Controls(), 0),
        ("without the code", 0): case.without_code,
        ("after others", 0): case.after_others,
    }
    for kind, controls in KINDS.items():
        for column, asking in enumerate((max(1, rows // 8), rows)):
            measured[kind, column] = lambda c=controls, n=asking: case.seconds(c, n)
    best = dict.fromkeys(measured, float("inf"))
    for _ in range(ROUNDS):
        for key, measure in measured.items():
            best[key] = min(best[key], measure())
    plain = best["plain", 0]
    print(f"\n{name}, {rows} rows, context {context}: {plain * 1e3:.3f} ms without controls")
    for kind in ("without the code", "after others"):
        print(f"  {kind:24} {best[kind, 0] / plain:6.3f}")
    for kind in KINDS:
        some, every = (best[kind, column] / plain for column in range(2))
        print(f"  {kind:24} one row in eight {some:6.3f}   all rows {every:6.3f}")


def main() -> None:
    """Report the chosen models and batches."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--rows", nargs="+", type=int)
    parser.add_argument("--context", type=int)
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)
        for rows in args.rows or (8, 32):
            context = args.context or 64
            report("the bundled model", make_cpu_runner(rows, context), rows, context)
        return
    for model in args.models:
        for rows in args.rows or (64, 256):
            context = args.context or 1024
            options = {"block_size": None, "enforce_eager": False, "drafts": 0}
            report(model, make_runner(model, rows, context, 2048, options), rows, context)


if __name__ == "__main__":
    main()
