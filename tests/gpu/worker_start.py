"""A worker's start beside the process that compiles, then steps of all kinds.

Arguments: `MODEL DTYPE`. It is a process of its own, since a process compiles each kernel once. It
prints JSON: the kernels that the worker has compiled itself before it was ready, and after that.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import triton

from sidestep.executor.gpu.gpu_runner import GpuRunner
from sidestep.executor.processes.kernel_compiler import CompilerArgs
from sidestep.executor.runner.runner import WorkerArgs
from sidestep.ipc.config_sections import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
from sidestep.ipc.model.model_spec import load_model_spec
from sidestep.ipc.params.logits_controls import Controls
from sidestep.ipc.processes.process import spawn
from sidestep.ipc.transport.step import StepMasks
from tests.e2e.models import random_prompts
from tests.unit.executor.steps import Request, schedule

CONTROLS = [
    Controls(),
    Controls(logit_bias={7: 5.0}, logprobs=3),
    Controls(allowed_token_ids=[7, 8]),
    Controls(presence_penalty=0.5, repetition_penalty=1.1),
    Controls(bad_words=[[1, 2], [3]]),
    Controls(prompt_logprobs=2),
    Controls(has_grammar=True),
]


def requests(vocab_size: int, number: int, seed: int) -> list[Request]:
    prompts = random_prompts(number, vocab_size, longest=200, seed=seed)
    return [
        Request(
            p,
            5 + i % 7,
            temperature=[0.0, 0.9][i % 2],
            top_k=[0, 9, 0][i % 3],
            top_p=[1.0, 0.8][i % 2],
            seed=i,
            min_tokens=i % 4,
            stop_ids=[3],
            controls=CONTROLS[(i + seed) % len(CONTROLS)],
        )
        for i, p in enumerate(prompts)
    ]


def run(runner: GpuRunner, some: list[Request], vocab_size: int, budget: int) -> None:
    for step, sampling in schedule(some, budget, 64):
        slots = [
            next(i for i, r in enumerate(some) if r is request)
            for request in sampling
            if request.controls.has_grammar
        ]
        step = replace(
            step,
            awaits_masks=int(bool(slots)),
            copy_sources=np.array([0], np.int32),
            copy_targets=np.array([1], np.int32),
        )
        rows = np.flatnonzero(np.isin(step.slots, slots)).astype(np.int32)
        masks = StepMasks(
            step_id=step.step_id,
            first_new=0,
            rows=rows,
            mask_indices=np.arange(len(rows), dtype=np.int32),
            words=np.full(len(rows) * -(-vocab_size // 32), -1, np.int32),
        )

        def receive(masks: StepMasks = masks) -> StepMasks:
            return masks

        output = runner.execute(step, receive).wait()
        for request, token in zip(sampling, output.token_ids.tolist(), strict=True):
            request.output.append(token)


def main(path: str, dtype: str) -> None:
    compiled, compiling = os.pipe()
    spec = load_model_spec(path)
    args = WorkerArgs(
        rank=0,
        spec=spec,
        model=ModelConfig(model=path, dtype=dtype, load_format="dummy"),
        cache=CacheConfig(num_kv_blocks=400),
        parallel=ParallelConfig(device="cuda"),
        scheduler=SchedulerConfig(max_num_seqs=80, max_num_batched_tokens=600),
        max_model_len=300,
    )
    compiler = spawn(
        "kernel compiler",
        "sidestep.executor.processes.kernel_compiler:main",
        CompilerArgs(worker=args, num_processes=8),
        pass_fds=(compiling,),
    )
    os.close(compiling)
    found: list[str] = []

    def note(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            found.append(src.name)

    triton.knobs.compilation.listener = note
    runner = GpuRunner(replace(args, compiled=compiled))
    before = list(found)
    for seed, (number, budget) in enumerate(
        ((1, 600), (1, 40), (5, 90), (12, 300), (30, 128), (80, 600))
    ):
        run(runner, requests(spec.vocab_size, number, seed), spec.vocab_size, budget)
    compiler.stop()
    print(json.dumps([before, found[len(before) :]]))


if __name__ == "__main__":
    main(*sys.argv[1:])
