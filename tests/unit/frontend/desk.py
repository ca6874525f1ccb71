"""A processor of outputs, and the core's messages to it, which a test makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sidestep import SamplingParams
from sidestep.frontend.input.tokenizer import Tokenizer
from sidestep.frontend.output.output_processor import OutputProcessor
from sidestep.frontend.output.request_state import RequestState
from sidestep.ipc.transport.messages import Finished, Outputs, pack_ids
from sidestep.ipc.transport.step import LogprobColumns
from tests.unit.frontend.fakes import input_processor


class Desk:
    """A processor with requests 0, 1, ..., and the handles that it has aborted."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.aborted: list[int] = []
        self.processor = OutputProcessor(self.aborted.extend)
        self.tokenizer = tokenizer
        self.states: list[RequestState] = []

    async def add(self, stream_interval: int = 1, **params: Any) -> RequestState:
        request = await input_processor(self.tokenizer).process(
            [5, 6], SamplingParams(**{"max_tokens": 50, **params})
        )
        state = RequestState(
            len(self.states), f"r{len(self.states)}", request, self.tokenizer, stream_interval
        )
        self.states.append(state)
        self.processor.add(state)
        return state

    def say(self, *tokens: tuple[int, int], **finished: Any) -> None:
        """Send one step: (handle, token) pairs; `finished` are the fields of request 0's end."""
        self.say_with_logprobs(tokens, [], **finished)

    def say_run(self, tokens: Sequence[int], handle: int = 0, **finished: Any) -> None:
        """Send one step that gives one request several tokens."""
        self.say(*((handle, token) for token in tokens), **finished)

    def say_with_logprobs(
        self,
        tokens: Sequence[tuple[int, int]],
        logprobs: Sequence[tuple[int, int, float]],
        **finished: Any,
    ) -> None:
        """Send one step, with (handle, token, logprob) of sampled tokens."""
        self.processor.handle(
            Outputs(
                handles=pack_ids(h for h, _ in tokens),
                token_ids=pack_ids(t for _, t in tokens),
                finished=[Finished(handle=0, **finished)] if finished else [],
                logprobs=_packed(logprobs) if logprobs else b"",
            )
        )


def _packed(logprobs: Sequence[tuple[int, int, float]]) -> bytes:
    handles, ids, values = zip(*logprobs, strict=True)
    ones = np.ones(len(ids), np.int32)
    columns = LogprobColumns(
        np.array(handles, np.int32),
        np.zeros(len(ids), np.int32),
        ones,
        ones,
        np.array(ids, np.int32),
        np.array(values, np.float32),
    )
    return columns.pack().tobytes()
