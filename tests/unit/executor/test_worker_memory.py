"""The memory of a CPU worker beside its weights and its cache.

It does not grow with the number or the sizes of its steps.
"""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest

from sidestep.executor.hosts.local_ranks import worker_environment
from sidestep.executor.runner.kv_cache_size import cpu_kv_blocks
from sidestep.executor.runner.runner import WorkerArgs
from sidestep.ipc.config_sections import (
    DEFAULT_MODEL,
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from sidestep.ipc.model.kv.kv_layout import kv_layout
from sidestep.ipc.model.layer_spec import attention_of
from sidestep.ipc.model.model_spec import load_model_spec

STEPS = """
import random
from sidestep.executor.cpu.cpu_runner import ModelRunner
from sidestep.executor.runner.runner import WorkerArgs
from sidestep.ipc.config_sections import DEFAULT_MODEL, CacheConfig, ModelConfig
from sidestep.ipc.config_sections import ParallelConfig, SchedulerConfig
from sidestep.ipc.model.model_spec import load_model_spec
from tests.unit.executor.steps import Request, schedule

def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

rng = random.Random(0)
runner = ModelRunner(WorkerArgs(
    rank=0, spec=load_model_spec(DEFAULT_MODEL), model=ModelConfig(DEFAULT_MODEL, dtype="float32"),
    cache=CacheConfig(block_size=16, num_kv_blocks=256), parallel=ParallelConfig(device="cpu"),
    scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=512), max_model_len=128))

def run(rounds: int) -> int:
    for _ in range(rounds):
        requests = [
            Request([rng.randrange(3, 4000) for _ in range(rng.randint(1, 30))], rng.randint(1, 8))
            for _ in range(rng.randint(1, 24))
        ]
        for step, _ in schedule(requests, rng.choice([24, 50, 200]), 16):
            runner.execute(step).wait()
    return resident()

first = run(12)
print(first, run(24))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_steps_of_all_sizes_leave_nothing_behind() -> None:
    """Check that later steps add less than a tenth of torch's own memory.

    There are some two hundred steps, of which the first third may warm up.
    """
    ran = subprocess.run(
        [sys.executable, "-c", STEPS],
        check=True,
        text=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={**os.environ, **worker_environment(1)},
    )
    first, last = map(int, ran.stdout.split())
    assert last - first < 20 << 20, (first, last)


def test_a_small_model_has_a_small_cache() -> None:
    """Compare the caches of a small and a large model.

    A small model's cache has room for one request of full length and for short ones in all slots; a
    large model's has the largest size.
    """
    spec = load_model_spec(DEFAULT_MODEL)
    args = WorkerArgs(
        rank=0,
        spec=spec,
        model=ModelConfig(DEFAULT_MODEL),
        cache=CacheConfig(),
        parallel=ParallelConfig(device="cpu"),
        scheduler=SchedulerConfig(),
        max_model_len=2048,
    )
    limits = args.scheduler.limits("cpu")
    token_bytes = 4 * sum(2 * one.num_kv_heads * one.head_dim for one in attention_of(spec.layers))
    layout = kv_layout(spec, itemsize=4, block_size=16)
    blocks = cpu_kv_blocks(args, limits, layout)
    assert 16 * blocks >= max(2048, 32 * limits.max_num_seqs)
    assert 16 * blocks * token_bytes <= 256 << 20
    large = cpu_kv_blocks(args, limits, msgspec.structs.replace(layout, itemsize=400))
    assert 16 * large * 100 * token_bytes <= 2 << 30 and 16 * large >= 2048
