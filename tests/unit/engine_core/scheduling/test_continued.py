"""Requests that come with tokens which another replica gave before it died.

They end as if they had never moved.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sidestep.engine_core.structured_outputs.grammars import Grammars
from sidestep.frontend.input.output_form import make_grammar
from sidestep.ipc.config_sections import DEFAULT_MODEL
from sidestep.ipc.params.sampling_params import RepetitionDetectionParams
from sidestep.ipc.params.structured_outputs_params import StructuredOutputsParams
from sidestep.ipc.transport.messages import AddRequest, FinishReason, pack_ids
from tests.fakes import Clock, Engine, make_request, make_scheduler

PROMPT = [5, 6, 7, 5, 6]


def run(
    message: AddRequest,
    grammars: Grammars | None = None,
    vocab_size: int = 50,
    eos: tuple[int, ...] = (),
) -> Engine:
    engine = Engine(make_scheduler(grammars=grammars, eos=eos, budget=8), vocab_size=vocab_size)
    engine.scheduler.add(message)
    engine.run()
    return engine


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.0},
        {"stop_token_ids": [3, 17, 40, 22], "min_tokens": 4},
        {"ignore_eos": True},
        {"repetition_detection": RepetitionDetectionParams(max_pattern_size=1, min_count=2)},
    ],
    ids=str,
)
def test_wherever_it_was_cut_it_goes_on_to_the_same_end(sampling: dict[str, Any]) -> None:
    message = make_request(PROMPT, 24, **sampling)
    whole = run(message, eos=(9, 11, 30))
    tokens, finished = whole.tokens[0], whole.finished[0]
    for cut in range(1, len(tokens)):
        rest = run(
            msgspec.structs.replace(message, output_token_ids=pack_ids(tokens[:cut])),
            eos=(9, 11, 30),
        )
        assert tokens[:cut] + rest.tokens[0] == tokens
        assert (rest.finished[0].reason, rest.finished[0].stop_reason) == (
            finished.reason,
            finished.stop_reason,
        )


def test_it_goes_on_within_its_grammar() -> None:
    grammars = Grammars(DEFAULT_MODEL, 4096, (0, 2), Clock(), 1, 1)
    grammars.load()
    grammar = make_grammar(StructuredOutputsParams(regex="[ab]{3} [0-9]{4} (yes|no)"), {})
    message = make_request(PROMPT, 60, grammar=grammar)
    whole = run(message, grammars, 4096, (0, 2))
    assert whole.finished[0].reason is FinishReason.STOP
    for cut in range(1, len(whole.tokens[0])):
        rest = run(
            msgspec.structs.replace(message, output_token_ids=pack_ids(whole.tokens[0][:cut])),
            grammars,
            4096,
            (0, 2),
        )
        assert whole.tokens[0][:cut] + rest.tokens[0] == whole.tokens[0]


def test_it_may_be_preempted_again() -> None:
    message = make_request(PROMPT, 20)
    expected = run(message).tokens[0]
    engine = Engine(make_scheduler(num_blocks=8, block_size=4, max_num_seqs=2))
    engine.scheduler.add(make_request([1, 2, 3], 20, handle=1))
    engine.scheduler.add(msgspec.structs.replace(message, output_token_ids=pack_ids(expected[:3])))
    engine.run()
    assert engine.finished[0].num_preemptions > 0
    assert expected[:3] + engine.tokens[0] == expected
