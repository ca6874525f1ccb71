"""Ranks of a GPU's runner without a GPU (see gpu_stand_in.py), each of them a process.

`python -m tests.triton.sums.gpu_ranks MODEL TENSOR_PARALLEL_SIZE STAGES`

All run the same steps. There are as many groups of requests as stages, and they take turns: a stage
computes one while the ids of the others are in transit. The program prints in JSON the tokens of
each step, from the last stage's ranks and from one rank on the CPU.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path

import torch

from sidestep.executor.runner.runner import Runner
from sidestep.ipc.transport.step import StepInput
from tests.triton.gpu_stand_in import InterpretedRunner, mixed_requests, standing_in, worker_args
from tests.triton.support import skip_overflow_checks
from tests.unit.executor.steps import schedule
from tests.unit.executor.test_model_runner import make_runner

_BLOCKS = 5
"""Number of KV blocks of each group."""


def steps_of(stages: int) -> list[StepInput]:
    """Return the groups' steps in turns; a group's steps are as many beats apart as stages."""
    groups = [list(group(number, stages)) for number in range(stages)]
    return [step for step in chain.from_iterable(zip_longest(*groups)) if step is not None]


def group(number: int, stages: int) -> list[StepInput]:
    """Return two requests, in slots and blocks of their own."""
    requests = mixed_requests()[number : number + 2]
    steps = []
    for turn, (step, _) in enumerate(schedule(requests, 12, 16)):
        step.entering["slot"] += 2 * number
        beat = turn * stages + number
        steps.append(
            replace(
                step,
                step_id=beat,
                beat=beat,
                slots=step.slots + 2 * number,
                block_ids=step.block_ids + _BLOCKS * number,
            )
        )
    return steps


def tokens(runner: Runner, steps: list[StepInput]) -> list[list[int]]:
    found = [runner.execute(step).wait().token_ids.tolist() for step in steps]
    runner.settle()
    return found


def run_rank(model: str, rank: int, size: int, stages: int, folder: Path) -> None:
    args = replace(
        worker_args(model, tensor_parallel_size=size, pipeline_parallel_size=stages),
        rank=rank,
        rendezvous=str(folder / "meeting"),
    )
    with standing_in():
        runner = InterpretedRunner(args)
        runner.load()
        (folder / str(rank)).write_text(json.dumps(tokens(runner, steps_of(stages))))


def main(model: str, size: int, stages: int) -> None:
    torch.set_num_threads(1)
    skip_overflow_checks()
    with tempfile.TemporaryDirectory() as name:
        folder, ranks = Path(name), size * stages
        children = []
        for rank in range(ranks):
            child = os.fork()
            if not child:
                run_rank(model, rank, size, stages, folder)
                os._exit(0)
            children.append(child)
        if any([os.waitpid(child, 0)[1] for child in children]):
            raise SystemExit("a rank failed")
        got = [json.loads((folder / str(rank)).read_text()) for rank in range(ranks - size, ranks)]
    print(json.dumps([got, tokens(make_runner(model), steps_of(stages))]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
