"""All proposers by their names in the registry, and the rates of synthetic drafts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidestep.executor.speculation.frequent import FrequentProposer
from sidestep.executor.speculation.proposer import Proposer, ProposerSettings
from sidestep.executor.speculation.synthetic import SyntheticProposer
from sidestep.ipc.common.registry import PROPOSERS, load
from sidestep.ipc.transport.step import Int32
from tests.unit.executor.speculation.lookups import plain_frequent, token_rows

VOCAB = 50
REPEATED = np.array([4, 8, 15, 16, 23, 42, 4, 8, 15], np.int32)
OTHER = np.array([16, 23, 42, 4, 8, 49, 16, 23], np.int32)
SCRIPT = np.random.default_rng(1).integers(0, VOCAB, 4000).astype(np.int32)
"""The tokens that the oracle tells, by position."""


class Script:
    """An oracle of one request in each slot, whose tokens are SCRIPT."""

    def __init__(self, known: int = 0) -> None:
        self.known = known

    def __call__(self, slot: int, count: int) -> Int32:
        return SCRIPT[self.known : self.known + count]


PLAIN = ProposerSettings(VOCAB, seed=3)
SETTINGS = {
    "plain": PLAIN,
    "oracle": dataclasses.replace(PLAIN, acceptance_rate=0.5, oracle=Script(9)),
}


@pytest.fixture(params=sorted(SETTINGS))
def settings(request: pytest.FixtureRequest) -> ProposerSettings:
    return SETTINGS[request.param]


@pytest.fixture(params=sorted(PROPOSERS))
def kind(request: pytest.FixtureRequest) -> type[Proposer]:
    found: type[Proposer] = load(PROPOSERS[request.param])
    return found


def entered(kind: type[Proposer], settings: ProposerSettings, *requests: Int32) -> Proposer:
    """Return a proposer in whose slot 1 these requests ran, one after the other."""
    proposer = kind(settings)
    for tokens in requests:
        proposer.begin(1, tokens[:3])
        for length in range(3, len(tokens) + 1):
            proposer.propose(1, tokens[:length], 4)
    return proposer


def test_a_proposer_keeps_the_contract(kind: type[Proposer], settings: ProposerSettings) -> None:
    proposer = entered(kind, settings, REPEATED)
    for num in range(8):
        for tokens in (REPEATED, OTHER, REPEATED[:1], np.full(30, VOCAB - 1, np.int32)):
            before = tokens.copy()
            drafts = proposer.propose(1, tokens, num)
            assert drafts.dtype == np.int32 and drafts.ndim == 1
            assert len(drafts) <= num, "more drafts than asked for"
            assert all(0 <= token < VOCAB for token in drafts.tolist()), "outside the vocabulary"
            assert drafts.tolist() == proposer.propose(1, tokens, num).tolist(), "not the same"
            assert tokens.tolist() == before.tolist(), "wrote to the tokens"


def test_nothing_stays_of_a_slots_last_request(
    kind: type[Proposer], settings: ProposerSettings
) -> None:
    fresh = entered(kind, settings, REPEATED)
    used = entered(kind, settings, OTHER, REPEATED)
    assert fresh.propose(1, REPEATED, 4).tolist() == used.propose(1, REPEATED, 4).tolist()


def test_slots_do_not_share_anything(kind: type[Proposer], settings: ProposerSettings) -> None:
    alone, beside = entered(kind, settings, REPEATED), entered(kind, settings, REPEATED)
    beside.begin(0, OTHER)
    beside.propose(0, OTHER, 4)
    assert alone.propose(1, REPEATED, 4).tolist() == beside.propose(1, REPEATED, 4).tolist()


def test_the_first_drafts_do_not_depend_on_how_many_are_asked_for(
    kind: type[Proposer], settings: ProposerSettings
) -> None:
    proposer = entered(kind, settings, REPEATED)
    longest = proposer.propose(1, REPEATED, 6).tolist()
    for num in range(6):
        assert proposer.propose(1, REPEATED, num).tolist() == longest[:num]


def test_look_up_proposes_nothing_where_it_finds_nothing() -> None:
    proposer: Proposer = load(PROPOSERS["ngram"])(PLAIN)
    assert proposer.propose(0, np.arange(40, dtype=np.int32), 4).tolist() == []
    assert proposer.propose(0, REPEATED, 4).tolist() == [16, 23, 42, 4]


@pytest.mark.parametrize("name", ["ngram", "frequent"])
@pytest.mark.parametrize(("fewest", "most"), [(0, 3), (3, 2), (-1, -1)])
def test_look_up_refuses_ranges_that_hold_no_length(fewest: int, most: int, name: str) -> None:
    with pytest.raises(ValueError, match=f"matches of {fewest} to {most} tokens are no range"):
        load(PROPOSERS[name])(ProposerSettings(VOCAB, min_match=fewest, max_match=most))


@given(token_rows, st.integers(1, 3), st.integers(0, 3), st.integers(0, 6))
def test_drafts_by_frequency_are_those_of_the_definition(
    tokens: list[int], fewest: int, more: int, num: int
) -> None:
    settings = ProposerSettings(VOCAB, min_match=fewest, max_match=fewest + more)
    found = FrequentProposer(settings).propose(0, np.array(tokens, np.int32), num)
    assert found.tolist() == plain_frequent(tokens, fewest, fewest + more, num)


def test_the_most_frequent_follower_wins_over_the_latest() -> None:
    proposer: Proposer = load(PROPOSERS["frequent"])(ProposerSettings(VOCAB, min_match=1))
    tokens = np.array([1, 7, 1, 7, 1, 8, 1], np.int32)
    assert proposer.propose(0, tokens, 1).tolist() == [7]


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.7, 1.0])
def test_synthetic_drafts_are_right_at_the_given_rate(rate: float) -> None:
    script = Script()
    proposer = SyntheticProposer(
        ProposerSettings(VOCAB, acceptance_rate=rate, seed=7, oracle=script)
    )
    verified = right = 0
    while script.known < len(SCRIPT) - 5:  # as a verified step does
        drafts = proposer.propose(0, SCRIPT[: script.known], 4).tolist()
        accepted = 0
        while accepted < 4 and drafts[accepted] == SCRIPT[script.known + accepted]:
            accepted += 1
        right += accepted
        verified += accepted + (accepted < 4)
        script.known += accepted + 1
    assert right / verified == pytest.approx(rate, abs=0.04 if 0 < rate < 1 else 0)


def test_a_position_keeps_its_synthetic_draft_when_the_step_before_ends_elsewhere() -> None:
    script = Script()
    proposer = SyntheticProposer(ProposerSettings(VOCAB, acceptance_rate=0.5, oracle=script))
    whole = proposer.propose(0, SCRIPT[:0], 40).tolist()
    for script.known in range(36):
        assert (
            proposer.propose(0, SCRIPT[: script.known], 4).tolist()
            == whole[script.known : script.known + 4]
        )


def test_synthetic_drafts_end_where_the_oracle_ends() -> None:
    proposer = SyntheticProposer(
        ProposerSettings(VOCAB, acceptance_rate=1.0, oracle=Script(len(SCRIPT) - 2))
    )
    assert proposer.propose(0, SCRIPT[:-2], 4).tolist() == SCRIPT[-2:].tolist()


def test_without_an_oracle_synthetic_drafts_are_seldom_right_and_a_rate_is_refused() -> None:
    proposer = SyntheticProposer(ProposerSettings(VOCAB, seed=2))
    drafts = proposer.propose(0, SCRIPT[:0], len(SCRIPT))
    assert np.mean(drafts == SCRIPT) == pytest.approx(1 / VOCAB, abs=0.01)
    with pytest.raises(ValueError, match="needs an oracle"):
        SyntheticProposer(ProposerSettings(VOCAB, acceptance_rate=0.1))


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_a_rate_is_a_share(rate: float) -> None:
    with pytest.raises(ValueError, match=r"acceptance rate of .* is not in 0 .. 1"):
        SyntheticProposer(ProposerSettings(VOCAB, acceptance_rate=rate, oracle=Script()))
