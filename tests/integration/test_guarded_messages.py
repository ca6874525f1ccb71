"""Bytes at the core's socket: whatever one frontend sends, it ends nothing of the others.

A frontend that is wrong, or another program in its place, joins an engine whose other frontends
have requests in flight. Each of its messages that has an envelope gets an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sidestep import AsyncLLM, EngineArgs, SamplingParams
from sidestep.executor.runner.fake import expected_tokens
from sidestep.ipc.processes.core_args import Invitation
from sidestep.ipc.transport.channels import FrontendChannel
from sidestep.ipc.transport.envelope import seal
from sidestep.ipc.transport.messages import (
    AbortRequests,
    AddRequest,
    Answer,
    Call,
    CallWorkers,
    CancelCall,
    Connect,
    Finished,
    FinishReason,
    Outputs,
    ToCore,
    pack_ids,
)
from sidestep.ipc.transport.worker_calls import ApplyWeights, Sleep, StartProfile

PATIENCE_S = 30.0
"""Seconds that an answer may take on a busy machine."""
_ENVELOPE = 8
"""Bytes of an envelope."""


class Others(threading.Thread):
    """An engine and two of its frontends, which stream one request after the other."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self._model = model
        self.invitation = ""
        self.is_ready, self._stop_event = threading.Event(), threading.Event()
        self.num_exact = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        """Serve until `end`."""
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self.error = error
        self.is_ready.set()

    async def _serve(self) -> None:
        args = EngineArgs(model=self._model, device="fake", fake_step_ms=1, max_num_seqs=8)
        async with AsyncLLM.from_engine_args(args) as llm:
            second = AsyncLLM.join(await llm.invite())
            self.invitation = await llm.invite()
            self.is_ready.set()
            await asyncio.gather(*(self._stream(each, i) for i, each in enumerate((llm, second))))
            second.shutdown()

    async def _stream(self, llm: AsyncLLM, number: int) -> None:
        vocab = llm.get_tokenizer().vocab_size
        for seed in itertools.count(number):
            async for output in llm.generate(
                [5, number, 7], SamplingParams(max_tokens=60, seed=seed, ignore_eos=True)
            ):
                pass
            expected = expected_tokens([5, number, 7], 60, seed, vocab)
            assert output.outputs[0].token_ids == expected
            self.num_exact += 1
            if self._stop_event.is_set():
                return

    def end(self) -> None:
        """End the engine when the requests in flight are complete, and raise what went wrong."""
        self._stop_event.set()
        self.join(60)
        assert not self.is_alive(), "a request never ended"
        if self.error is not None:
            raise self.error


class Wrong:
    """The frontend that sends wrong messages."""

    def __init__(self, invitation: str) -> None:
        (seat,) = Invitation.decode(invitation).seats
        self.client = seat.client
        self._channel = FrontendChannel(seat.address)
        assert self._channel.wait_message(PATIENCE_S) is not None
        self._channel.seal()
        self._call_ids = itertools.count(1000)

    def send(self, data: bytes) -> None:
        """Send bytes as they are."""
        self._channel._out.send(data, zmq.NOBLOCK)

    def until_answer(self) -> tuple[dict[int, Finished], dict[int, Answer]]:
        """Return the ends and the answers that come before the answer to a ping."""
        ping = next(self._call_ids)
        self._channel.send(Call(client=self.client, call_id=ping, method="ping"))
        finished: dict[int, Finished] = {}
        answers: dict[int, Answer] = {}
        while True:
            message = self._channel.wait_message(PATIENCE_S)
            assert message is not None, "the core does not answer"
            if isinstance(message, Outputs):
                finished |= {each.handle: each for each in message.finished}
            elif isinstance(message, Answer):
                if message.call_id == ping:
                    assert message.error is None
                    return finished, answers
                answers[message.call_id] = message

    def until_finished(self, handle: int) -> Finished:
        """Return the end of a request."""
        while True:
            finished, _ = self.until_answer()
            if handle in finished:
                return finished[handle]

    def close(self) -> None:
        """Leave."""
        self._channel.close()


@pytest.fixture(scope="module")
def wrong(fake_model: str) -> Iterator[Wrong]:
    """Yield a wrong frontend; the others' requests must be exact to the end."""
    others = Others(fake_model)
    others.start()
    assert others.is_ready.wait(60)
    frontend = None
    try:
        if others.error is None:
            frontend = Wrong(others.invitation)
            yield frontend
    finally:
        if frontend is not None:
            frontend.close()
        others.end()
    assert others.num_exact >= 2


def request(sender: int, **fields: Any) -> AddRequest:
    """Return a short request that is right but for these fields."""
    right = AddRequest(
        client=sender,
        handle=7,
        request_id="r",
        prompt_token_ids=pack_ids([1, 2]),
        sampling=SamplingParams(max_tokens=2, seed=1, ignore_eos=True),
        arrival=0.0,
    )
    return msgspec.structs.replace(right, **fields)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda data: data[:-3], "could not read the message"),
        (lambda data: data[:_ENVELOPE], "could not read the message"),
        (lambda data: data[:_ENVELOPE] + b"\x93\x01\x02\x03", "could not read the message"),
        (lambda data: data[:_ENVELOPE] + b"\x91" * 5000, "could not read the message"),
        (lambda data: data[:3] + b"\0" + data[4:], None),
    ],
    ids=["truncated", "nothing but the envelope", "wrong types", "nested", "envelope changed"],
)
def test_a_request_that_cannot_be_read_ends_with_an_error_that_says_so(
    wrong: Wrong, change: Callable[[bytes], bytes], told: str | None
) -> None:
    wrong.send(change(seal(request(wrong.client, handle=40))))
    end = wrong.until_finished(40)
    if told is not None:
        assert end.reason is FinishReason.ERROR and told in (end.error or "")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"prompt_token_ids": b"abc"}, "prompt_token_ids: 3 bytes are no column"),
        ({"output_token_ids": b"abcde"}, "output_token_ids: 5 bytes are no column"),
        ({"prompt_token_ids": pack_ids([10**9])}, "prompt_token_ids: 1000000000 is not a token"),
        ({"controls": b"\xff"}, "controls: cannot be read"),
        ({"client": 0}, "it is of frontend 0"),
        ({"sampling": SamplingParams(top_k=2**40, max_tokens=2)}, "top_k: "),
        ({"deadline": float("nan")}, "deadline: is not a time"),
        ({"pooling": "last"}, "pooling: this model makes text"),
    ],
)
def test_a_request_that_cannot_run_ends_with_an_error_that_names_the_field(
    wrong: Wrong, fields: dict[str, Any], told: str
) -> None:
    wrong.send(seal(request(wrong.client, **{"handle": 41, **fields})))
    end = wrong.until_finished(41)
    assert end.reason is FinishReason.ERROR and told in (end.error or "")
    wrong.send(seal(request(wrong.client, handle=41)))
    assert wrong.until_finished(41).reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    "make",
    [
        lambda client: Call(client=client, call_id=5, method="no such method"),
        lambda client: Call(client=client, call_id=5, method="request_records", limit=-1),
        lambda client: Call(client=0, call_id=5, method="stats"),
        lambda client: Connect(client=client, call_id=5, to_core="nowhere", from_core="?"),
        lambda client: Connect(client=client, call_id=5, to_core="ipc:///a", from_core="\0"),
        lambda client: CallWorkers(
            client=client, call_id=5, call=Sleep(level=1), wait_s=float("inf")
        ),
        lambda client: CallWorkers(client=client, call_id=5, call=StartProfile(folder="/\0")),
        lambda client: CallWorkers(client=client, call_id=5, call=ApplyWeights(folder="")),
    ],
)
def test_a_call_that_cannot_be_taken_gets_an_error(
    wrong: Wrong, make: Callable[[int], ToCore]
) -> None:
    wrong.send(seal(make(wrong.client)))
    answers: dict[int, Answer] = {}
    while 5 not in answers:
        answers = wrong.until_answer()[1]
    assert answers[5].error is not None


def test_a_handle_that_is_in_use_cannot_be_used_twice(wrong: Wrong) -> None:
    long = request(
        wrong.client, handle=42, sampling=SamplingParams(max_tokens=500, seed=1, ignore_eos=True)
    )
    wrong.send(seal(long))
    wrong.send(seal(long))
    end = wrong.until_finished(42)
    assert end.reason is FinishReason.ERROR and "handle: 42 is in use" in (end.error or "")


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=12,
)


@st.composite
def messages(draw: st.DrawFn) -> Callable[[int], bytes]:
    """Return a function from the sender's number to bytes: garbage, or a message changed."""
    kind = draw(st.sampled_from(["garbage", "truncated", "flipped", "values", "field", "client"]))
    if kind == "garbage":
        garbage = draw(st.binary(max_size=60))
        return lambda client: garbage
    tag = draw(st.sampled_from(["add", "abort", "call", "workers", "cancel", "connect"]))
    claimed = draw(st.integers(-1, 4)) if kind == "client" else None
    at, value = draw(st.integers(0, 400)), draw(VALUES)

    def make(client: int) -> bytes:
        data = seal(_right(tag, client if claimed is None else claimed))
        if kind == "truncated":
            return data[: at % len(data)]
        if kind == "flipped":
            changed = bytearray(data)
            changed[at % len(data)] ^= 1 << at % 8
            return bytes(changed)
        if kind == "values":
            return data[:_ENVELOPE] + msgspec.msgpack.encode(value)
        if kind == "field":
            fields = msgspec.msgpack.decode(data[_ENVELOPE:])
            fields[at % len(fields)] = value
            return data[:_ENVELOPE] + msgspec.msgpack.encode(fields)
        return data

    return make


def _right(tag: str, client: int) -> ToCore:
    right: dict[str, ToCore] = {
        "add": request(client),
        "abort": AbortRequests(client=client, handles=[0, 1, 2, 3]),
        "call": Call(client=client, call_id=5, method="stats"),
        "workers": CallWorkers(client=client, call_id=5, call=ApplyWeights(folder="/")),
        "cancel": CancelCall(client=client, call_id=5),
        "connect": Connect(client=client, call_id=5, to_core="no", from_core="where"),
    }
    return right[tag]


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(messages(), min_size=1, max_size=5))
def test_no_bytes_of_a_frontend_end_the_engine(
    wrong: Wrong, made: list[Callable[[int], bytes]]
) -> None:
    for make in made:
        wrong.send(make(wrong.client))
    wrong.until_answer()
    with contextlib.suppress(zmq.Again):
        wrong._channel.send(AbortRequests(client=wrong.client, handles=list(range(16))))
