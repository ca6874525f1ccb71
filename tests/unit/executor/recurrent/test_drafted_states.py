"""Rows that verify drafts go on from the state of the last draft that was accepted."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from sidestep.executor.speculation.proposer import Proposer, ProposerSettings
from sidestep.ipc.config_sections import SchedulerConfig
from sidestep.ipc.transport.step import Int32
from tests.e2e.models import load_reference, random_prompts, reference_tokens, write_model
from tests.fakes import Engine, make_request, make_scheduler
from tests.unit.executor.test_model_runner import make_runner

pytestmark = pytest.mark.usefixtures("one_thread")
COUNT, BLOCK = 24, 8


class PartlyRight(Proposer):
    """Drafts the tokens that the model gives, up to one that it does not give."""

    def __init__(self, settings: ProposerSettings) -> None:
        self._random = random.Random(1)
        self.whole: list[list[int]] = []
        """Each request with its outputs."""

    def begin(self, slot: int, tokens: Int32) -> None:
        """Need no note: the tokens of requests differ."""

    def propose(self, slot: int, tokens: Int32, most: int) -> Int32:
        """Return `most` drafts, of which the first ones are right."""
        known = tokens.tolist()
        # A step in flight may sample behind the end of a request, which is dropped.
        (whole,) = [one for one in self.whole if one[: len(known)] == known[: len(one)]]
        drafts = (whole[len(known) :] + [0] * most)[:most]
        if (wrong := self._random.randrange(most + 1)) < most:
            drafts[wrong] = (drafts[wrong] + 1) % 331
        return np.array(drafts, np.int32)


@pytest.mark.parametrize("num_drafts", [1, 3])
@pytest.mark.parametrize("family", ["qwen3.5", "qwen3-next"])
def test_tokens_are_those_without_drafts(family: str, num_drafts: int, tmp_path: Path) -> None:
    path = write_model(family, tmp_path)
    prompts = random_prompts(6, 331, longest=60, seed=2)
    expected = reference_tokens(load_reference(path), prompts, [COUNT] * len(prompts))
    config = {"method": "ngram", "num_speculative_tokens": num_drafts, "adaptive": False}
    runner = make_runner(
        path,
        BLOCK,
        40,
        scheduler=SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=40, speculative_config=config
        ),
    )
    proposer = PartlyRight(ProposerSettings(331))
    proposer.whole = [prompt + out for prompt, out in zip(prompts, expected, strict=True)]
    runner._drafted._proposer = proposer
    scheduler = make_scheduler(
        num_blocks=40,
        block_size=BLOCK,
        max_num_seqs=4,
        budget=40,
        max_model_len=256,
        speculative=config,
        num_states=runner.ready.num_states,
    )
    engine = Engine(scheduler, vocab_size=331, runner=runner)
    for handle, prompt in enumerate(prompts):
        scheduler.add(make_request(prompt, COUNT, handle=handle, temperature=0.0))
    engine.run()
    assert [engine.tokens[handle] for handle in range(len(prompts))] == expected
    told = [engine.finished[handle].drafts for handle in range(len(prompts))]
    drafted = sum(one.num_draft_tokens for one in told if one is not None)
    accepted = sum(one.num_accepted_tokens for one in told if one is not None)
    assert 0.2 * drafted < accepted < 0.8 * drafted
