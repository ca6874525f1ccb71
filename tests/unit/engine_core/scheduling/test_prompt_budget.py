"""Chunks of prompts, sized to keep the pace of decodes."""

from __future__ import annotations

import numpy as np
import pytest

from sidestep.engine_core.scheduling.prompt_budget import PromptBudget
from sidestep.engine_core.scheduling.scheduler import Scheduler
from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.config_sections import SchedulerConfig
from sidestep.ipc.transport.step import StepInput, StepOutput
from tests.fakes import make_request, make_scheduler


class Device:
    """A device that takes 5 ms for a step and 20 us more for each token of a prompt."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.now = 0

    def step(self) -> tuple[int, float]:
        """Run one step; return its tokens of prompts, and its milliseconds."""
        step = self.scheduler.schedule()
        assert isinstance(step, StepInput)
        prompts = int(step.num_tokens[step.num_tokens > 1].sum())
        took = 5_000_000 + 20_000 * prompts
        tokens = np.full(len(self.scheduler._plans[0].sampling), 7, np.int32)
        self.scheduler.update(StepOutput(step.step_id, self.now, self.now + took, tokens))
        self.now += took
        return prompts, took / 1e6


def scheduler_with_target(milliseconds: float | None) -> Scheduler:
    return make_scheduler(
        num_blocks=4000,
        block_size=16,
        max_num_seqs=64,
        budget=4096,
        max_model_len=32_000,
        prefix_caching=False,
        overlap=False,
        target_itl_ms=milliseconds,
    )


def add_prompts(scheduler: Scheduler, count: int, length: int) -> None:
    for handle in range(1, count + 1):
        scheduler.add(make_request([5] * length, 4, handle=handle))


def test_steps_with_decodes_last_as_long_as_wished() -> None:
    device = Device(scheduler_with_target(25))
    device.scheduler.add(make_request([5] * 100, 1000, handle=0))
    for _ in range(50):
        device.step()
    add_prompts(device.scheduler, 1, 4000)
    device.scheduler.add(make_request([5] * 3000, 4, handle=2))
    assert device.step()[0] == 4095, "more prompts wait than a step can take"
    steps = [device.step() for _ in range(12)]
    assert all(took <= 26 for _, took in steps)
    assert [took for took, _ in steps if took][-2] > 600, "what a token takes has been learnt"


def test_with_more_prompts_than_a_step_can_take_steps_are_full() -> None:
    device = Device(scheduler_with_target(25))
    device.scheduler.add(make_request([5] * 100, 1000, handle=0))
    for _ in range(50):
        device.step()
    add_prompts(device.scheduler, 20, 3000)
    assert [device.step()[0] for _ in range(3)] == [4095, 4094, 4093]


def test_prompts_alone_take_the_whole_budget() -> None:
    """A request without decodes beside it is not slowed."""
    device = Device(scheduler_with_target(25))
    add_prompts(device.scheduler, 1, 4096)
    assert device.step()[0] == 4096
    while device.scheduler.has_unfinished:
        device.step()
    device.scheduler.add(make_request([5] * 4000, 4, handle=99))
    assert device.step()[0] == 4000


@pytest.mark.parametrize("milliseconds", [0, None])
def test_no_target(milliseconds: float | None) -> None:
    """Cover the default where there is no GPU."""
    device = Device(scheduler_with_target(milliseconds))
    device.scheduler.add(make_request([5] * 100, 1000, handle=0))
    for _ in range(20):
        device.step()
    add_prompts(device.scheduler, 2, 4000)
    assert device.step()[0] == 4095


def test_prompts_go_on_where_decodes_alone_last_too_long() -> None:
    device = Device(scheduler_with_target(1))
    device.scheduler.add(make_request([5] * 100, 1000, handle=0))
    for _ in range(50):
        device.step()
    add_prompts(device.scheduler, 1, 1000)
    assert [device.step()[0] for _ in range(5)] == [256, 256, 256, 232, 0]


def test_several_prompts_share_a_steps_chunk() -> None:
    device = Device(scheduler_with_target(25))
    device.scheduler.add(make_request([5] * 400, 1000, handle=0))
    for _ in range(80):
        device.step()
    add_prompts(device.scheduler, 6, 300)
    assert 400 < device.step()[0] < 1200
    assert device.scheduler.stats()["num_running"] > 2


def test_what_is_learnt() -> None:
    budget = PromptBudget(0.025, 8192)
    assert budget.tokens(1, 0) == 8192, "nothing is known yet"
    for _ in range(100):
        budget.learn(0, 0.005)
    budget.learn(10, 1.0)
    assert budget.tokens(1, 0) == 8192, "few tokens say nothing"
    for _ in range(30):
        budget.learn(1000, 0.025)
    assert budget.tokens(1, 0) == 895, "1,000 tokens, but a step's are multiples of 128"
    for _ in range(30):
        budget.learn(500, 0.025)
    assert budget.tokens(1, 0) == 383, "prompts have become slower"
    assert budget.tokens(0, 0) == 8192, "nobody waits for a token"
    assert budget.tokens(1, 8193) == 8192, "a queue is shortest with full steps"
    budget.learn(500, 0.0)
    assert budget.tokens(1, 0) <= 8192


def test_the_default_is_a_gpus() -> None:
    assert SchedulerConfig().limits("cuda").target_itl_s == 0.027
    assert SchedulerConfig().limits("cpu").target_itl_s == 0
    assert SchedulerConfig(target_itl_ms=40).limits("cpu").target_itl_s == 0.04
    assert SchedulerConfig(target_itl_ms=0).limits("cuda").target_itl_s == 0


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_targets_that_are_none(value: float) -> None:
    with pytest.raises(ValidationError, match="target_itl_ms"):
        SchedulerConfig(target_itl_ms=value)
