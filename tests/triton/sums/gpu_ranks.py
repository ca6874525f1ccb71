"""Ranks of a GPU's runner without a GPU (see gpu_stand_in.py), each of them a process.

`python -m tests.triton.sums.gpu_ranks MODEL TENSOR_PARALLEL_SIZE STAGES DRAFTS`

All run the same steps. There are as many groups of requests as stages, and they take turns: a stage
computes one while the ids of the others are in transit. With DRAFTS, steps that decode verify up to
that many drafts a row. Ranks have whole experts. The program prints in JSON the tokens of each
step, or with drafts those of each slot, from the last stage's ranks and from one rank on the CPU,
which has no drafts.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import defaultdict
from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path

import torch

from sidestep.executor.gpu.gpu_runner import GpuRunner
from sidestep.executor.runner.runner import Runner
from sidestep.ipc.config import with_whole_experts
from sidestep.ipc.model.layer_spec import ExpertsSpec
from sidestep.ipc.params.logits_controls import Controls
from sidestep.ipc.transport.step import StepInput
from tests.triton.gpu_stand_in import mixed_requests, standing_in, worker_args
from tests.triton.support import skip_overflow_checks
from tests.unit.executor.steps import Request, make_step, schedule
from tests.unit.executor.test_model_runner import make_runner

ALLOWED = [5, 6], [21, 41, 47]
"""Tokens that a request with drafts may have, by group. Outputs of the first repeat at once. The
second group's outputs change, and so depend on the tokens before them."""
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
        for name in ("slot", "state"):
            step.entering[name] += 2 * number
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


def drafting_steps(stages: int, drafts: int, decodes: int) -> list[StepInput]:
    """Return the steps of groups that may verify drafts, with this many steps that decode.

    A group has two requests, which have all their blocks. Few tokens are allowed for the second.
    Many of its drafts are right.
    """
    steps: list[StepInput] = []
    for number in range(stages):
        prompt = [7 + number, 8, 7 + number, 8]
        requests = [
            Request(prompt, 30, temperature=0.8 * number, top_k=4, seed=number),
            Request(prompt, 30, controls=Controls(allowed_token_ids=ALLOWED[number % 2])),
        ]
        slots = [2 * number, 2 * number + 1]
        own = [
            make_step([(slot, len(prompt), range(3 * slot, 3 * slot + 3))], {slot: request})
            for slot, request in zip(slots, requests, strict=True)
        ]
        for step in own:
            step.entering["max_drafts"] = drafts
        for _ in range(decodes):
            own.append(make_step([(slot, 1, []) for slot in slots]))
            own[-1].num_drafts = drafts
        for turn, step in enumerate(own):
            step.step_id = step.beat = turn * stages + number
        steps += own
    return sorted(steps, key=lambda step: step.beat)


def slot_tokens(runner: Runner, steps: list[StepInput]) -> list[list[int]]:
    """Return the tokens of each slot; each row of these steps samples."""
    found: dict[int, list[int]] = defaultdict(list)
    for step in steps:
        # Stages that are not the last give nothing.
        for slot, row in zip(
            step.slots.tolist(), runner.execute(step).wait().by_row(), strict=False
        ):
            found[slot] += row
    runner.settle()
    return [found[slot] for slot in sorted(found)]


def tokens(runner: Runner, steps: list[StepInput]) -> list[list[int]]:
    found = [runner.execute(step).wait().token_ids.tolist() for step in steps]
    runner.settle()
    return found


def run_rank(model: str, rank: int, size: int, stages: int, drafts: int, folder: Path) -> None:
    args = worker_args(
        model, drafts=drafts, tensor_parallel_size=size, pipeline_parallel_size=stages
    )
    has_experts = any(isinstance(layer.mlp, ExpertsSpec) for layer in args.spec.layers)
    args = replace(
        args,
        rank=rank,
        spec=with_whole_experts(args.spec) if has_experts else args.spec,
        rendezvous=str(folder / "meeting"),
    )
    with standing_in():
        runner = GpuRunner(args)
        found = (
            slot_tokens(runner, drafting_steps(stages, drafts, 4))
            if drafts
            else tokens(runner, steps_of(stages))
        )
        (folder / str(rank)).write_text(json.dumps(found))


def main(model: str, size: int, stages: int, drafts: int) -> None:
    torch.set_num_threads(1)
    skip_overflow_checks()
    with tempfile.TemporaryDirectory() as name:
        folder, ranks = Path(name), size * stages
        children = []
        for rank in range(ranks):
            child = os.fork()
            if not child:
                run_rank(model, rank, size, stages, drafts, folder)
                os._exit(0)
            children.append(child)
        if any([os.waitpid(child, 0)[1] for child in children]):
            raise SystemExit("a rank failed")
        got = [json.loads((folder / str(rank)).read_text()) for rank in range(ranks - size, ranks)]
    runner = make_runner(model)
    expected = (
        slot_tokens(runner, drafting_steps(stages, 0, 20))
        if drafts
        else tokens(runner, steps_of(stages))
    )
    print(json.dumps([got, expected]))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
