"""The core's own check of requests: each wrong field is named, and right requests pass."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from sidestep.engine_core.requests.request_checks import RequestChecks
from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.model.pooling_spec import PoolingSpec
from sidestep.ipc.params.beam_search_params import BeamSearchParams
from sidestep.ipc.params.logits_controls import Controls, encode_controls
from sidestep.ipc.params.sampling_params import SamplingParams
from sidestep.ipc.params.structured_outputs_params import Grammar
from sidestep.ipc.transport.messages import CallWorkers, pack_ids
from sidestep.ipc.transport.worker_calls import AnyCall, Sleep, StartProfile
from tests.fakes import SPEC, VOCAB_SIZE, make_beam_request, make_pooling_request, make_request

CHECKS = RequestChecks(SPEC)
POOLING = RequestChecks(
    msgspec.structs.replace(
        SPEC, pooling=PoolingSpec(task="embed", pooling="last", width=8, activation="none")
    )
)
GRAMMAR = Grammar("regex", "{}")


def sampling(**fields: Any) -> dict[str, SamplingParams]:
    return {"sampling": SamplingParams(**fields)}


def controls(**fields: Any) -> dict[str, bytes]:
    return {"controls": encode_controls(Controls(**fields))}


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("prompt_token_ids", {"prompt_token_ids": b"abc"}),
        ("prompt_token_ids", {"prompt_token_ids": pack_ids([1, -1])}),
        ("prompt_token_ids", {"prompt_token_ids": pack_ids([1, VOCAB_SIZE])}),
        ("output_token_ids", {"output_token_ids": b"abcde"}),
        ("output_token_ids", {"output_token_ids": pack_ids([VOCAB_SIZE])}),
        ("output_token_ids", {"output_token_ids": pack_ids([1]), **sampling(n=2)}),
        ("arrival", {"arrival": math.nan}),
        ("deadline", {"deadline": math.inf}),
        ("priority", {"priority": 2**31}),
        ("num_public_tokens", {"num_public_tokens": -1}),
        ("top_k", sampling(top_k=2**31)),
        ("min_tokens", sampling(min_tokens=2**31, max_tokens=2**32)),
        ("stop_token_ids", sampling(stop_token_ids=[VOCAB_SIZE])),
        ("controls", {"controls": b"\x00"}),
        ("controls", controls(has_grammar=True)),
        ("controls", {"grammar": GRAMMAR}),
        ("controls", controls(is_beam=True)),
        ("logprobs", controls(logprobs=21)),
        ("prompt_logprobs", controls(prompt_logprobs=-2)),
        ("presence_penalty", controls(presence_penalty=math.nan)),
        ("repetition_penalty", controls(repetition_penalty=0.0)),
        ("allowed_token_ids", controls(allowed_token_ids=[VOCAB_SIZE])),
        ("logit_bias", controls(logit_bias={-1: 1.0})),
        ("logit_bias", controls(logit_bias={1: math.inf})),
        ("bad_words", controls(bad_words=[[1], []])),
        ("bad_words", controls(bad_words=[[1] * 33])),
        ("bad_words", controls(bad_words=[[VOCAB_SIZE]])),
        ("extra_args", controls(extra_args={"Unknown": {}})),
        ("pooling", {"pooling": "last"}),
        ("grammar", {"grammar": GRAMMAR, "beam_search": BeamSearchParams(beam_width=2)}),
        ("beam_width", {"beam_search": BeamSearchParams(beam_width=VOCAB_SIZE // 2 + 1)}),
    ],
)
def test_a_field_that_no_step_can_run_is_named(field: str, changes: dict[str, Any]) -> None:
    message = msgspec.structs.replace(make_request([1, 2]), **changes)
    with pytest.raises(ValidationError, match=f"^{field}: "):
        CHECKS.check_request(message)


def test_requests_that_are_right_pass() -> None:
    for message in (
        make_request([0, VOCAB_SIZE - 1], n=3, deadline=9.0, priority=-(2**31)),
        make_request([1], grammar=GRAMMAR),
        make_beam_request([1], BeamSearchParams(beam_width=VOCAB_SIZE // 2)),
        msgspec.structs.replace(
            make_request([1], stop_token_ids=[VOCAB_SIZE - 1]),
            output_token_ids=pack_ids([2]),
            **controls(logprobs=20, bad_words=[[1] * 32], logit_bias={0: -100.0}),
        ),
    ):
        CHECKS.check_request(message)
    POOLING.check_request(make_pooling_request([1]))


@pytest.mark.parametrize(
    "changes", [{"pooling": None}, sampling(n=2), {"beam_search": BeamSearchParams(beam_width=1)}]
)
def test_a_model_that_pools_makes_no_text(changes: dict[str, Any]) -> None:
    message = msgspec.structs.replace(make_pooling_request([1]), **changes)
    with pytest.raises(ValidationError, match=r"^pooling: "):
        POOLING.check_request(message)


@pytest.mark.parametrize(
    ("field", "call", "wait_s"),
    [
        ("wait_s", StartProfile(folder="/tmp"), math.nan),
        ("wait_s", StartProfile(folder="/tmp"), math.inf),
        ("wait_s", StartProfile(folder="/tmp"), -1.0),
        ("folder", StartProfile(folder="/tmp/\0"), 1.0),
        ("level", Sleep(level=3), 1.0),
    ],
)
def test_a_call_that_would_harm_is_refused(field: str, call: AnyCall, wait_s: float) -> None:
    with pytest.raises(ValidationError, match=f"^{field}: "):
        CHECKS.check_call(CallWorkers(client=0, call_id=1, call=call, wait_s=wait_s))
