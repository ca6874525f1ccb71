"""What controls of logits add to a decode step on a GPU, beside the same step without any, in one run.

    python benchmarks/gpu_controls.py [--models qwen3-0.6b llama-3.1-8b] [--rows 64 256] [--context 1024]

For each model and batch, the time of a captured step without controls; then, for each kind of control, of the same step
where one row in eight asks for it, and where all do, as ratios to the first.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu_step import Steps, make_runner, step_time
from benchmarks.workloads import MODELS
from sidestep.ipc.controls import Controls, encode_controls
from sidestep.ipc.step import StepInput

KINDS = {
    "logprobs=0": Controls(logprobs=0), "logprobs=5": Controls(logprobs=5), "logprobs=20": Controls(logprobs=20),
    "logit_bias of 10": Controls(logit_bias={i: 0.5 for i in range(10)}),
    "allowed_token_ids, 100": Controls(allowed_token_ids=list(range(100))),
    "penalties": Controls(presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1),
    "bad_words, 10": Controls(bad_words=[[i, i + 1, i + 2] for i in range(10)])}


class ControlledSteps(Steps):
    """The first `asking` requests have controls."""

    def __init__(self, rows: int, context: int, block_size: int, vocab_size: int, controls: Controls,
                 asking: int) -> None:
        super().__init__(rows, context, block_size, vocab_size)
        self._asked = encode_controls(controls)
        self._asking = asking

    def __next__(self) -> StepInput:
        step = super().__next__()
        sizes = np.where(np.arange(len(step.new_slots)) < self._asking, len(self._asked), 0).astype(np.int32)
        asking = int((sizes > 0).sum())
        return dataclasses.replace(step, new_control_sizes=sizes,
                                   new_controls=np.frombuffer(self._asked * asking, np.uint8))


def report(model: str, rows: int, context: int) -> None:
    """One model and batch."""
    runner = make_runner(model, rows, context, 2048, {"block_size": None, "enforce_eager": False})
    shape = (rows, context, runner._block_size, 1000)

    def seconds(controls: Controls, asking: int) -> float:
        times = []
        for _ in range(3):
            runner._reset()
            times.append(step_time(runner, ControlledSteps(*shape, controls, asking)))
        return min(times)

    plain = seconds(Controls(), 0)
    print(f"\n{model}, {rows} rows, context {context}: {plain * 1e3:.3f} ms without controls")
    for name, controls in KINDS.items():
        some, every = (seconds(controls, asking) / plain for asking in (max(1, rows // 8), rows))
        print(f"  {name:24} one row in eight {some:6.3f}   all rows {every:6.3f}")
    print(f"  {'without, again':24} {seconds(Controls(), 0) / plain:6.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--rows", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--context", type=int, default=1024)
    args = parser.parse_args()
    for model in args.models:
        for rows in args.rows:
            report(model, rows, args.context)


if __name__ == "__main__":
    main()
