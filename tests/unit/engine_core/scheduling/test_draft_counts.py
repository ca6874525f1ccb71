"""The counts of drafts that an engine tells: of each request, of each step and in all."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes import Engine, make_request, make_scheduler


def engine_of(**speculative: Any) -> Engine:
    """Return an engine that always verifies 3 drafts."""
    config = {"num_speculative_tokens": 3, "adaptive": False, **speculative}
    return Engine(make_scheduler(speculative=config))


def test_a_request_that_ends_tells_its_drafts() -> None:
    engine = engine_of(method="synthetic", synthetic_acceptance_rate=1.0)
    engine.scheduler.add(make_request([1, 2, 3], 13))
    engine.run()
    drafts = engine.finished[0].drafts
    assert drafts is not None
    # The prompt's step gives one token, and three steps give four tokens each.
    assert (drafts.num_drafts, drafts.num_draft_tokens, drafts.num_accepted_tokens) == (3, 9, 9)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_the_drafts_of_all_requests_are_those_of_the_statistics(rate: float) -> None:
    engine = engine_of(method="synthetic", synthetic_acceptance_rate=rate)
    for handle in range(5):
        engine.scheduler.add(make_request([1, 2, handle], 20 + handle, handle=handle))
    engine.run()
    stats = engine.scheduler.stats()
    told = [finished.drafts for finished in engine.finished.values()]
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert sum(getattr(drafts, name) for drafts in told) == stats[f"spec_decode_{name}"], name
    tokens = sum(map(len, engine.tokens.values()))
    by_position = [stats[f"spec_decode_num_accepted_tokens_per_pos_{i}"] for i in range(3)]
    assert sum(by_position) == stats["spec_decode_num_accepted_tokens"] < tokens
    assert by_position == sorted(by_position, reverse=True)


def test_a_request_that_stops_within_a_run_counts_its_last_step() -> None:
    engine = engine_of(method="synthetic", synthetic_acceptance_rate=1.0)
    engine.scheduler.add(make_request([1, 2, 3], 9))
    engine.run()
    stop = engine.tokens[0][2]
    engine = engine_of(method="synthetic", synthetic_acceptance_rate=1.0)
    engine.scheduler.add(make_request([1, 2, 3], 9, stop_token_ids=[stop]))
    engine.run()
    drafts = engine.finished[0].drafts
    assert len(engine.tokens[0]) == 3 and drafts is not None
    assert (drafts.num_drafts, drafts.num_draft_tokens) == (1, 3)


def test_without_speculation_nothing_is_told_of_drafts() -> None:
    engine = Engine(make_scheduler())
    engine.scheduler.add(make_request([1, 2, 3], 5))
    engine.run()
    assert engine.finished[0].drafts is None
    assert not any("spec_decode" in name for name in engine.scheduler.stats())


def test_the_statistics_tell_how_many_drafts_a_row_verifies_now() -> None:
    engine = engine_of()
    assert engine.scheduler.stats()["spec_decode_draft_length"] == 0, "no step yet"
    engine.scheduler.add(make_request([1, 2, 3], 5))
    engine.run()
    assert engine.scheduler.stats()["spec_decode_draft_length"] == 3
