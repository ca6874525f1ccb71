"""The words of recurrent layers in a step's message, as the steps and the graphs read them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sidestep.executor.recurrent.state_words import FEW_SAVES, StateWords
from sidestep.executor.runner.host_tables import HostTables
from sidestep.executor.runner.input_batch import make_batch
from sidestep.executor.runner.kv_cache_size import gpu_kv_blocks, gpu_states, state_bytes
from sidestep.executor.runner.runner import WorkerArgs
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.config_sections import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
from sidestep.ipc.model.cache_groups import LayerPlace
from sidestep.ipc.model.kv.kv_layout import KvLayout
from sidestep.ipc.model.layer_size import LayerKv
from sidestep.ipc.model.model_spec import load_model_spec
from sidestep.kernels.recurrent.state_rows import rows_on_host
from tests.recurrent.models import KINDS
from tests.unit.executor.steps import Request, make_step

LIMITS = SchedulerConfig(max_num_seqs=20, max_num_batched_tokens=64).limits("cuda", 1)


def test_rows_that_pad_a_step_have_no_tokens_and_save_nothing() -> None:
    tables, words = HostTables(20, 64, 16, has_states=True), StateWords(LIMITS)
    buffer = np.full(words.count, 12345, np.int32)
    step = make_step([(3, 1, [0]), (5, 12, [1])], {3: Request([1], 4), 5: Request([2] * 30, 4)})
    step.saved_slots, step.saved_counts, step.saved_states = np.array(
        [[5, 5], [10, 7], [9, 8]], np.int32
    )
    tables.apply(step)
    words.pack(buffer, make_batch(tables, step, 16))
    later = make_step([(3, 1, []), (5, 18, [2])])
    for many in (False, True):
        rows = words.rows(torch.from_numpy(buffer), 4, 64, 4, has_many_saves=many)
        first, second = rows_on_host(rows)
        assert (first.state_in, first.saves) == (-1, ((1, 3),))
        assert (second.state_in, second.saves) == (-1, ((7, 8), (10, 9), (12, 5)))
        assert len(rows.state_in) == (20 if many else 16)
        assert len(rows.save_rows) == (LIMITS.most_states if many else FEW_SAVES)
        assert rows.max_long_rows == 4 and rows.max_long_tokens == 64
    tables.apply(later)
    words.pack(buffer, make_batch(tables, later, 16))
    rows = words.rows(torch.from_numpy(buffer), 4, 64, 4)
    assert [(row.state_in, row.saves) for row in rows_on_host(rows)] == [
        (3, ((1, 3),)),
        (5, ((18, 5),)),
    ]


def test_steps_without_prompts_launch_nothing_for_chunks() -> None:
    words = StateWords(LIMITS)
    rows = words.rows(torch.zeros(words.count, dtype=torch.int32), 8, 8, 0)
    assert len(rows.state_in) == 8 and rows.max_long_rows == rows.max_long_tokens == 0
    assert rows_on_host(rows) == [], "a message of zeros has no rows"


def test_rows_with_drafts_write_a_state_behind_each_token() -> None:
    limits, queries = replace(LIMITS, num_drafts=4), 3
    tables, words = HostTables(20, 64, 16, has_states=True), StateWords(limits)
    buffer = np.full(words.count, 12345, np.int32)
    held = {3: Request([1], 4), 5: Request([2] * 30, 4)}
    tables.apply(make_step([(3, 1, [0]), (5, 12, [1])], held))
    tables.num_computed[[3, 5]] = 1, 12
    step = make_step([(3, 1, []), (5, 1, [])])
    step.num_drafts = queries - 1
    step.saved_slots, step.saved_counts, step.saved_states = np.array([[5], [1], [9]], np.int32)
    words.pack(buffer, make_batch(tables, step, 16), queries)
    rows = words.rows(torch.from_numpy(buffer), 4, 4 * queries, 0, queries=queries)
    assert (rows.max_drafts, rows.max_long_rows) == (2, 0)
    first, second = rows_on_host(rows)
    assert (first.state_in, first.saves) == (15, ((1, 15), (2, 16), (3, 17)))
    assert (second.state_in, second.tokens) == (25, slice(3, 6))
    assert second.saves == ((1, 45), (1, 25), (2, 26), (3, 27))


def test_states_take_half_of_what_is_left_at_most(tmp_path: Path) -> None:
    config = KINDS["qwen3_5"][1]()
    config.architectures = [KINDS["qwen3_5"][0].__name__]
    config.save_pretrained(tmp_path)
    args = WorkerArgs(
        rank=0,
        spec=load_model_spec(str(tmp_path)),
        model=ModelConfig(),
        cache=CacheConfig(gpu_memory_utilization=0.5),
        parallel=ParallelConfig(),
        scheduler=SchedulerConfig(),
        max_model_len=1 << 20,
    )
    size, working = state_bytes(args, LIMITS, 2), 1000
    assert size > 0
    # Two blocks take as many bytes as a state.
    kept = LayerKv(num_kv_heads=1, head_dim=1)
    layout = KvLayout(layers=(kept,), places=(LayerPlace(0, 0),), itemsize=size // 4, block_size=1)

    def count(states: int, cache: CacheConfig = args.cache) -> tuple[int, int]:
        """Return the states and the blocks, with room for this many states."""
        total = 2 * (size * states + working)
        free = total
        own = replace(args, cache=cache)
        found = gpu_states(own, LIMITS, 2, free=free, total=total, working=working)
        blocks = gpu_kv_blocks(
            own, LIMITS, layout, free=free, total=total, working=working, states=found * size
        )
        return found, blocks

    assert count(10) == (5, 10)
    assert count(1000) == (41, 2 * (1000 - 41))
    asked = CacheConfig(kv_cache_memory_bytes=6 * size)
    assert count(1000, asked) == (6, 12), "as much again as the keys and values"
    with pytest.raises(EngineStartError, match="two states of the recurrent layers"):
        count(3)
