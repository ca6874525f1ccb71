"""Rows of several tokens: the same tokens with any drafts, counts that are corrected, no leak."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from sidestep.engine_core.scheduling.draft_budget import DraftBudget
from sidestep.engine_core.scheduling.step_plan import StepPlan
from sidestep.executor.runner.fake import expected_tokens
from sidestep.ipc.model.speculative_config import SpeculativeConfig, tiers_of
from sidestep.ipc.transport.step import StepOutput
from tests.fakes import VOCAB_SIZE, Clock, Engine, make_request, make_scheduler
from tests.small_grammars import SmallGrammars, small_grammar

PROPOSERS: list[dict[str, Any]] = [
    {"method": "ngram", "prompt_lookup_min": 1},
    {"method": "frequent"},
    *({"method": "synthetic", "synthetic_acceptance_rate": rate} for rate in (0.0, 0.3, 0.7, 1.0)),
]


def fixed(most: int, **more: Any) -> dict[str, Any]:
    """Return a configuration with as many drafts in each step as there may be."""
    return {"num_speculative_tokens": most, "adaptive": False, **more}


@pytest.mark.parametrize("proposer", PROPOSERS, ids=str)
@pytest.mark.parametrize("most", range(1, 6))
def test_a_thousand_requests_give_their_own_tokens(most: int, proposer: dict[str, Any]) -> None:
    """Forty requests at each setting of other things; with all settings there are a thousand."""
    engine = Engine(make_scheduler(num_blocks=96, speculative=fixed(most, **proposer)))
    wanted = {}
    for handle in range(40):
        prompt = [1 + handle % 7] * (1 + handle % 9) + [handle % VOCAB_SIZE]
        count = 1 + handle % 23
        wanted[handle] = expected_tokens(prompt, count, handle, VOCAB_SIZE)
        engine.scheduler.add(make_request(prompt, count, handle=handle))
        engine.turn()
    engine.run()
    assert engine.tokens == wanted
    assert engine.scheduler.kv.pool.num_used == 0
    assert any(step.num_drafts for step in engine.steps)


def test_a_chunk_of_one_token_verifies_no_drafts() -> None:
    """Keep the budget for parked choices, so that the prompt comes in chunks of one token."""
    engine = Engine(
        make_scheduler(budget=5, max_num_seqs=5, speculative=fixed(1, method="frequent"))
    )
    prompt = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3]
    request = make_request(prompt, 6, n=5)
    engine.scheduler.add(request)
    engine.run()
    for choice in range(5):
        seed = request.sampling.for_choice(choice).seed or 0
        assert engine.tokens[choice] == expected_tokens(prompt, 6, seed, VOCAB_SIZE)


@pytest.mark.parametrize("position", range(12))
def test_a_stop_at_every_position_of_an_accepted_run(position: int) -> None:
    """The tokens behind the stop are dropped, whether they were accepted or not."""
    tokens = expected_tokens([3, 4], 40, 0, VOCAB_SIZE)
    stop = next(i for i in range(position, 40) if tokens[i] not in tokens[:i])
    engine = Engine(
        make_scheduler(
            speculative=fixed(5, method="synthetic", synthetic_acceptance_rate=1.0), num_blocks=32
        )
    )
    engine.scheduler.add(make_request([3, 4], 40, stop_token_ids=[tokens[stop]]))
    engine.run()
    assert engine.tokens[0] == tokens[: stop + 1]
    assert engine.finished[0].stop_reason == tokens[stop]
    assert engine.scheduler.kv.pool.num_used == 0


def test_two_steps_launch_while_the_results_of_earlier_ones_are_held_back() -> None:
    engine = Engine(
        make_scheduler(speculative=fixed(4, method="synthetic", synthetic_acceptance_rate=0.7))
    )
    engine.scheduler.add(make_request([1, 2, 3], 60))
    assert engine.launch()
    engine.take()
    for _ in range(20):
        while engine.num_in_flight < 2:
            assert engine.launch(), "a step waits for the counts of the step before"
        if len(engine.tokens[0]) > 40:
            break
        engine.take()
    assert sum(step.num_drafts > 0 for step in engine.steps) >= 5
    engine.run()
    assert engine.tokens[0] == expected_tokens([1, 2, 3], 60, 0, VOCAB_SIZE)


def test_blocks_are_reserved_for_all_drafts_and_never_more() -> None:
    """A request alone in a cache that just holds it runs to its end, and shares no garbage."""
    engine = Engine(
        make_scheduler(
            num_blocks=6,
            block_size=4,
            speculative=fixed(5, method="synthetic", synthetic_acceptance_rate=0.5),
        )
    )
    wanted = expected_tokens([9] * 4, 20, 0, VOCAB_SIZE)
    for handle in range(3):  # the later ones hit the blocks of the first
        engine.scheduler.add(make_request([9] * 4, 20, handle=handle, seed=0))
        engine.run()
        assert engine.tokens[handle] == wanted
    longer = [9] * 4 + wanted[:12]
    engine.scheduler.add(make_request(longer, 8, handle=7, seed=0))
    engine.run()
    assert engine.tokens[7] == wanted[12:], "a cached block has other tokens than its hash says"


def test_a_grammar_verifies_drafts_behind_masks_of_their_own() -> None:
    clock = Clock()
    grammars, form = SmallGrammars(clock), small_grammar("(abcd){9}")
    engine = Engine(
        make_scheduler(
            eos=(0,),
            clock=clock,
            grammars=grammars,
            speculative=fixed(4, method="ngram", prompt_lookup_min=1),
        )
    )
    wanted = grammars.expected_tokens(form, [1, 2], 40, 0)
    for handle in (0, 1):
        engine.scheduler.add(make_request([1, 2], 40, handle=handle, seed=0, grammar=form))
    engine.run()
    assert engine.tokens[0] == engine.tokens[1] == wanted
    assert engine.scheduler.stats()["spec_decode_num_accepted_tokens"] > 40


def test_tokens_that_a_grammar_forces_are_drafts() -> None:
    """The proposer is always wrong, so the accepted drafts are the grammar's own."""
    clock = Clock()
    grammars, form = SmallGrammars(clock), small_grammar("[x-z]{3}(abcd){5}[x-z]{3}")
    engine = Engine(
        make_scheduler(
            eos=(0,),
            clock=clock,
            grammars=grammars,
            speculative=fixed(3, method="synthetic", synthetic_acceptance_rate=0.0),
        )
    )
    engine.scheduler.add(make_request([1, 2], 40, grammar=form))
    engine.run()
    assert engine.tokens[0] == grammars.expected_tokens(form, [1, 2], 40, 0)
    assert engine.scheduler.stats()["spec_decode_num_accepted_tokens"] >= 12


@pytest.mark.parametrize("most", range(1, 14))
def test_a_length_within_a_run_that_ends_the_grammar(most: int) -> None:
    """The run goes on behind the last token that the request may have."""
    clock = Clock()
    grammars, form = SmallGrammars(clock), small_grammar("(abcd){3}")
    engine = Engine(make_scheduler(eos=(0,), clock=clock, grammars=grammars, speculative=fixed(5)))
    engine.scheduler.add(make_request([1, 2], most, grammar=form))
    engine.run()
    wanted = grammars.expected_tokens(form, [1, 2], 40, 0)
    finish = engine.finished[0]
    assert engine.tokens[0] == wanted[:most]
    assert finish.completes_grammar == (most >= len(wanted))
    assert str(finish.reason) == ("stop" if most >= len(wanted) else "length")


@pytest.mark.parametrize("rate", [0.3, 0.7, 1.0])
def test_the_reported_acceptance_is_the_one_that_was_built_in(rate: float) -> None:
    engine = Engine(
        make_scheduler(
            num_blocks=512,
            speculative=fixed(1, method="synthetic", synthetic_acceptance_rate=rate),
        )
    )
    for handle in range(8):
        engine.scheduler.add(make_request([handle + 1], 200, handle=handle))
    engine.run()
    stats = engine.scheduler.stats()
    drafts, accepted = (stats[f"spec_decode_num_{kind}_tokens"] for kind in ("draft", "accepted"))
    error = 4 * (rate * (1 - rate) / drafts) ** 0.5
    assert drafts > 500 and abs(accepted / drafts - rate) <= error
    assert stats["spec_decode_num_accepted_tokens_per_pos_0"] == accepted


# The number of drafts.


class Load:
    """Steps of a device whose times and acceptance are given."""

    def __init__(self, seconds: dict[int, float], rate: float, rows: int = 4) -> None:
        config = SpeculativeConfig.of({"num_speculative_tokens": 4})
        self.budget, self.seconds, self.rate, self.rows = DraftBudget(config), seconds, rate, rows
        self.rng = np.random.default_rng(0)
        self.chosen: list[int] = []

    def run(self, steps: int) -> float:
        """Run steps; return how many times as long as without drafts each token took."""
        time, tokens = 0.0, 0
        for number in range(steps):
            drafts = self.budget.choose(self.rows, 99)
            self.chosen.append(drafts)
            requests: list[Any] = [None] * self.rows
            plan = StepPlan(
                number, number, requests, requests, self.rows, 0, 0, [], num_drafts=drafts
            )
            right = np.cumprod(self.rng.random((self.rows, 4)) < self.rate, 1)
            accepted = right[:, :drafts].sum(1)
            end = int(self.seconds[drafts] * 1e9)
            output = StepOutput(number, 0, end, np.zeros(self.rows + accepted.sum(), np.int32))
            if drafts:
                output.sizes = (1 + accepted).astype(np.int32)
                output.num_drafts = np.full(self.rows, drafts, np.int32)
            else:
                output.num_unverified = self.rows
                output.num_unverified_right = int(right[:, 0].sum())
            self.budget.learn(plan, output)
            time, tokens = time + self.seconds[drafts], tokens + self.rows + int(accepted.sum())
        return time / tokens / (self.seconds[0] / self.rows)


CHEAP, DEAR = {0: 1.0, 2: 1.05, 4: 1.1}, {0: 1.0, 2: 2.9, 4: 4.6}


@pytest.mark.parametrize(
    ("seconds", "rate", "best"), [(CHEAP, 0.9, 4), (DEAR, 0.9, 0), (CHEAP, 0.0, 0), (CHEAP, 0.5, 4)]
)
def test_the_number_of_drafts_that_pays_is_found(
    seconds: dict[int, float], rate: float, best: int
) -> None:
    load = Load(seconds, rate)
    load.run(600)
    assert load.chosen[-200:].count(best) >= 190


@pytest.mark.parametrize(("seconds", "rate"), list(product((CHEAP, DEAR), (0.0, 0.1, 0.5, 0.95))))
def test_drafts_never_cost_more_than_a_few_steps(seconds: dict[int, float], rate: float) -> None:
    assert Load(seconds, rate).run(3000) <= 1.02


def test_it_turns_on_again_when_drafts_become_right() -> None:
    """Without drafts in its steps, it still learns whether the first draft would be right."""
    load = Load(CHEAP, 0.0)
    load.run(300)
    assert load.chosen[-1] == 0
    load.rate = 0.9
    load.run(300)
    assert load.chosen[-1] == 4


def test_each_size_of_batch_has_its_own_choice() -> None:
    load = Load(CHEAP, 0.9)
    load.run(300)
    load.rows, load.seconds = 64, DEAR
    load.run(300)
    assert load.chosen[-1] == 0
    load.rows, load.seconds = 4, CHEAP
    load.run(20)
    assert load.chosen[-1] == 4


def test_tiers_are_few_and_have_none_and_the_most() -> None:
    assert [tiers_of(most) for most in (0, 1, 2, 4, 5)] == [
        (0,),
        (0, 1),
        (0, 1, 2),
        (0, 2, 4),
        (0, 3, 5),
    ]
