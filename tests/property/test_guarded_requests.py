"""Requests of a frontend that is wrong in any way: they end alone, and no step fails for them."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestep.executor.runner.fake import expected_tokens
from sidestep.ipc.params.beam_search_params import BeamSearchParams
from sidestep.ipc.params.logits_controls import Controls, encode_controls
from sidestep.ipc.params.sampling_params import SamplingParams
from sidestep.ipc.params.structured_outputs_params import Grammar
from sidestep.ipc.transport.envelope import Refused, handles_of, open_sealed, seal
from sidestep.ipc.transport.messages import (
    AddRequest,
    Finished,
    pack_ids,
    unpack_ids,
)
from tests.fakes import VOCAB_SIZE, make_request
from tests.unit.engine_core.test_core import make_core

INT64 = st.one_of(st.integers(-(2**63), 2**63 - 1), st.sampled_from([-1, 0, 1, 2**31, 2**32]))
TIMES = st.one_of(st.floats(), st.just(0.0))
IDS = st.lists(
    st.one_of(st.integers(0, VOCAB_SIZE - 1), st.sampled_from([-1, VOCAB_SIZE, 2**31 - 1])),
    max_size=9,
)
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=9).map(pack_ids)
COLUMNS = st.one_of(TOKENS, TOKENS, TOKENS, IDS.map(pack_ids), st.binary(max_size=9))
SAMPLING = st.builds(
    SamplingParams,
    n=st.one_of(st.just(1), st.integers(1, 4), st.integers(1, 1024)),
    max_tokens=st.one_of(st.none(), st.integers(1, 9), st.integers(1, 2**62)),
    seed=st.one_of(st.none(), st.integers(0, 2**63 - 1)),
    top_k=st.one_of(st.just(0), st.integers(-1, 2**62)),
    stop_token_ids=st.one_of(st.none(), st.lists(st.integers(0, 2**40), max_size=3)),
    ignore_eos=st.booleans(),
    prompt_logprobs=st.one_of(st.none(), st.integers(0, 20)),
)
CONTROLS = st.one_of(
    st.just(b""),
    st.just(b""),
    st.binary(max_size=30),
    st.builds(
        Controls,
        presence_penalty=st.floats(),
        repetition_penalty=st.floats(),
        allowed_token_ids=st.lists(INT64, max_size=3),
        bad_words=st.lists(st.lists(INT64, max_size=2), max_size=2),
        logprobs=st.integers(-3, 50),
        logit_bias=st.dictionaries(INT64, st.floats(), max_size=2),
        has_grammar=st.booleans(),
        is_beam=st.booleans(),
    ).map(encode_controls),
    st.builds(Controls, logprobs=st.integers(-1, 3)).map(encode_controls),
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "prompt_token_ids": COLUMNS,
    "sampling": SAMPLING,
    "handle": st.one_of(st.integers(0, 9), st.integers(0, 2**31 - 1), INT64),
    "client": st.integers(-1, 3),
    "output_token_ids": COLUMNS,
    "arrival": TIMES,
    "priority": INT64,
    "cache_salt": st.text(max_size=3),
    "num_public_tokens": INT64,
    "deadline": TIMES,
    "controls": CONTROLS,
    "beam_search": st.builds(BeamSearchParams, beam_width=st.integers(1, 64)),
    "grammar": st.builds(Grammar, st.text(max_size=3), st.text(max_size=9)),
    "pooling": st.sampled_from(["last", "mean", "cls"]),
}
HOSTILE = st.lists(st.sampled_from(sorted(FIELDS)), min_size=1, max_size=2, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: FIELDS[name] for name in names})
)
"""One field or two of a request of frontend 0, right or wrong."""


def make_hostile(handle: int, fields: dict[str, Any]) -> AddRequest:
    return msgspec.structs.replace(make_request([7, 8], 3, handle=handle), **fields)


@settings(max_examples=250, deadline=None)
@given(st.lists(HOSTILE, min_size=1, max_size=4))
def test_a_request_that_is_wrong_ends_alone(hostile: list[dict[str, Any]]) -> None:
    core, executor, _ = make_core()
    ended: dict[tuple[int, int], Finished] = {}
    told: dict[int, list[int]] = {0: [], 1: []}

    def turn() -> None:
        for client, outputs in core.step():
            ended.update({(client, each.handle): each for each in outputs.finished})
            if client == 1:
                for handle, token in zip(
                    unpack_ids(outputs.handles).tolist(),
                    unpack_ids(outputs.token_ids).tolist(),
                    strict=True,
                ):
                    told[handle].append(token)
        if core.in_flight:
            executor.finish_step()

    core.handle(make_request([1, 2, 3], 9, client=1, handle=0))
    turn()
    sent = []
    for number, fields in enumerate(hostile):
        try:
            data = seal(message := make_hostile(number, fields))
            received = open_sealed(0, data)
        except Exception:
            continue  # no frontend can send it, or it has no envelope
        sent.append(message)
        assert isinstance(received, AddRequest | Refused)
        assert core.handle(received) is None
        turn()
    core.handle(make_request([4, 5], 9, client=1, handle=1))
    for _ in range(2000):
        turn()
        if not core.scheduler.has_unfinished:
            break
    assert told == {
        0: expected_tokens([1, 2, 3], 9, 0, VOCAB_SIZE),
        1: expected_tokens([4, 5], 9, 1, VOCAB_SIZE),
    }
    wanted = {(0, handle) for message in sent for handle in handles_of(message)}
    assert wanted <= set(ended), "a caller waits for ever"
    assert core.scheduler.kv.pool.num_used == 0
