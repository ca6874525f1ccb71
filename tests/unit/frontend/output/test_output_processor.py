"""The effect of one message of the core on the requests that it names."""

from __future__ import annotations

import asyncio

import pytest

from sidestep import EngineDeadError, RequestError, RequestOutputKind
from sidestep.frontend.output.outputs import RequestOutput
from sidestep.frontend.output.request_state import RequestState
from sidestep.ipc.transport.messages import FinishReason, Outputs, pack_ids
from tests.unit.frontend.desk import Desk


class Wakes:
    """A count of a reader's runs."""

    def __init__(self, state: RequestState) -> None:
        self.count = 0
        has_news = state.has_news

        def counted() -> bool:
            self.count += 1
            return has_news()

        state.has_news = counted  # type: ignore[method-assign]  # spied on


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_final_only_reader_runs_once_more_whatever_the_number_of_tokens(desk: Desk) -> None:
    state = await desk.add(output_kind=RequestOutputKind.FINAL_ONLY)
    wakes = Wakes(state)
    reader = asyncio.create_task(state.next_output())
    await settle()
    for token in range(70, 90):
        desk.say((0, token))
        await settle()
    assert wakes.count == 1, "it went to sleep and has not been woken"
    desk.say(reason=FinishReason.LENGTH)
    assert (await reader).outputs[0].token_ids == list(range(70, 90))
    assert wakes.count == 2


async def test_many_tokens_before_a_reader_runs_wake_it_once(desk: Desk) -> None:
    state = await desk.add(output_kind=RequestOutputKind.DELTA)
    wakes = Wakes(state)
    reader = asyncio.create_task(state.next_output())
    await settle()
    for token in (70, 71, 72):
        desk.say((0, token))
    assert (await reader).outputs[0].token_ids == [70, 71, 72]
    assert wakes.count == 2


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abc")])
async def test_a_stop_token_is_among_the_ids_but_not_in_the_text(
    desk: Desk, include: bool, text: str
) -> None:
    a, b, c = (desk.tokenizer.encode(letter)[0] for letter in "abc")
    state = await desk.add(stop_token_ids=[c], include_stop_str_in_output=include)
    desk.say((0, a))
    desk.say((0, b))
    desk.say((0, c), reason=FinishReason.STOP, stop_reason=c)
    completion = (await state.next_output()).outputs[0]
    assert (completion.text, completion.token_ids) == (text, [a, b, c])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", c)
    assert desk.aborted == []


async def test_a_stop_string_in_the_last_token_wins_over_the_core_s_reason(desk: Desk) -> None:
    state = await desk.add(stop="b")
    a, b = (desk.tokenizer.encode(letter)[0] for letter in "ab")
    desk.say((0, a))
    desk.say((0, b), reason=FinishReason.LENGTH)
    completion = (await state.next_output()).outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("a", "stop", "b")


async def test_the_tokens_of_a_stopped_request_end_with_the_one_that_completed_the_stop_string(
    desk: Desk,
) -> None:
    state = await desk.add(stop="name(")
    tokens = desk.tokenizer.encode("get_name(self)")
    for token in tokens:
        desk.say((0, token))
    completion = (await state.next_output()).outputs[0]
    assert completion.text == "get_"
    shorter = desk.tokenizer.decode(completion.token_ids[:-1])
    assert "name(" in desk.tokenizer.decode(completion.token_ids) and "name(" not in shorter
    assert desk.aborted == [0]


async def test_a_request_whose_text_cannot_be_made_fails_alone(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = await desk.add(), await desk.add()

    def broken(token: int) -> None:
        raise OverflowError("too much")

    assert bad._detokenizer is not None
    bad._detokenizer.add = broken  # type: ignore[method-assign]  # spied on
    desk.say((0, 70), (1, 70))
    with pytest.raises(RequestError, match="too much"):
        await bad.next_output()
    assert (await good.next_output()).outputs[0].token_ids == [70]
    assert desk.aborted == [0] and "'r0'" in caplog.text


async def test_without_detokenising_there_are_only_ids(desk: Desk) -> None:
    state = await desk.add(detokenize=False)
    desk.say((0, 70), reason=FinishReason.LENGTH)
    completion = (await state.next_output()).outputs[0]
    assert (completion.text, completion.token_ids, completion.finished()) == ("", [70], True)


async def test_a_deadline_is_told_with_the_text_so_far(desk: Desk) -> None:
    state = await desk.add()
    token = desk.tokenizer.encode("a")[0]
    desk.say((0, token))
    desk.say(reason=FinishReason.ABORT, stop_reason="deadline", num_preemptions=3)
    out = await state.next_output()
    assert (out.outputs[0].finish_reason, out.outputs[0].stop_reason, out.outputs[0].text) == (
        "abort",
        "deadline",
        "a",
    )
    assert out.metrics.num_preemptions == 3 and out.metrics.first_token_latency is not None


async def test_each_reader_gets_an_exception_of_its_own(desk: Desk) -> None:
    states = [await desk.add(), await desk.add()]
    desk.processor.fail_all(EngineDeadError("worker 0 was killed"))
    caught = []
    for state in states:
        with pytest.raises(EngineDeadError, match="worker 0 was killed") as info:
            await state.next_output()
        caught.append(info.value)
    assert caught[0] is not caught[1] and len(desk.processor) == 0


async def test_what_it_prints_tells_its_state(desk: Desk) -> None:
    state = await desk.add()
    assert repr(state) == "RequestState('r0', live, 0 tokens, 0 taken)"
    desk.say((0, 70), reason=FinishReason.LENGTH)
    assert repr(state) == "RequestState('r0', length, 1 tokens, 0 taken)"


async def test_a_stream_interval_tells_the_first_token_then_every_so_many_and_the_end(
    desk: Desk,
) -> None:
    state = await desk.add(stream_interval=3, output_kind=RequestOutputKind.DELTA)
    taken: list[list[int]] = []

    async def read() -> None:
        finished = False
        while not finished:
            output = await state.next_output()
            taken.append(output.outputs[0].token_ids)
            finished = output.finished

    reader = asyncio.create_task(read())
    for token in range(1, 10):
        await settle()
        desk.say((0, token))
    await settle()
    desk.say((0, 10), reason=FinishReason.LENGTH)
    await reader
    assert taken == [[1], [2, 3, 4], [5, 6, 7], [8, 9, 10]]


async def test_a_request_that_ends_within_an_interval_is_told_at_once(desk: Desk) -> None:
    state = await desk.add(stream_interval=50, output_kind=RequestOutputKind.DELTA)
    desk.say((0, 1))
    assert (await state.next_output()).outputs[0].token_ids == [1]
    waiting = asyncio.create_task(state.next_output())
    await settle()
    desk.say((0, 2), reason=FinishReason.STOP)
    assert (await waiting).outputs[0].token_ids == [2]


class Shelf:
    """A sink that can be closed."""

    def __init__(self) -> None:
        self.is_open = True
        self.outputs: list[list[int]] = []
        self.error: Exception | None = None

    def ready(self) -> bool:
        return self.is_open

    def put(self, output: RequestOutput) -> None:
        if self.error is not None:
            raise self.error
        self.outputs.append(output.outputs[0].token_ids)


async def test_outputs_are_pushed_until_the_sink_is_full_and_then_merge(desk: Desk) -> None:
    state, shelf = await desk.add(output_kind=RequestOutputKind.DELTA), Shelf()
    pushing = asyncio.create_task(state.push(shelf))
    await settle()
    desk.say((0, 70))
    desk.say((0, 71))
    assert shelf.outputs == [[70], [71]], "in the call itself, without a task"
    shelf.is_open = False
    desk.say((0, 72))
    shelf.is_open = True
    desk.say((0, 73))  # its reader has not been asked yet: nothing may overtake token 72
    await pushing
    assert shelf.outputs == [[70], [71]] and (await state.next_output()).outputs[0].token_ids == [
        72,
        73,
    ]
    desk.say((0, 74))
    await state.push(shelf)  # returns at once: there is an output to take first
    assert (await state.next_output()).outputs[0].token_ids == [74]
    pushing = asyncio.create_task(state.push(shelf))
    await settle()
    desk.say((0, 75), reason=FinishReason.LENGTH)
    await pushing
    last = await state.next_output()
    assert shelf.outputs == [[70], [71]] and last.finished and last.outputs[0].token_ids == [75]


async def test_a_pushing_reader_that_leaves_gets_nothing_more(desk: Desk) -> None:
    state, shelf = await desk.add(output_kind=RequestOutputKind.DELTA), Shelf()
    pushing = asyncio.create_task(state.push(shelf))
    await settle()
    pushing.cancel()
    await asyncio.gather(pushing, return_exceptions=True)
    desk.say((0, 70))
    desk.processor.drop([state])
    assert shelf.outputs == [] and desk.aborted == [0]


async def test_steps_that_come_together_are_told_together(desk: Desk) -> None:
    state, shelf = await desk.add(output_kind=RequestOutputKind.DELTA), Shelf()
    pushing = asyncio.create_task(state.push(shelf))
    await settle()
    for token, more in ((70, True), (71, True), (72, False), (73, False)):
        desk.processor.handle(Outputs(handles=pack_ids([0]), token_ids=pack_ids([token])), more)
    assert shelf.outputs == [[70, 71, 72], [73]]
    pushing.cancel()
    await asyncio.gather(pushing, return_exceptions=True)


async def test_a_sink_that_fails_ends_its_request_alone(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    states = [await desk.add(output_kind=RequestOutputKind.DELTA) for _ in range(3)]
    shelves = [Shelf() for _ in states]
    tasks = [
        asyncio.create_task(state.push(shelf)) for state, shelf in zip(states, shelves, strict=True)
    ]
    await settle()
    shelves[1].error = ValueError("no room")
    desk.say((0, 70), (1, 71), (2, 72))
    await tasks[1]
    with pytest.raises(RequestError, match="no room"):
        await states[1].next_output()
    assert (
        desk.aborted == [1] and len(desk.processor) == 2 and "could not be delivered" in caplog.text
    )
    desk.say((0, 73), (1, 74), (2, 75))
    assert [shelf.outputs for shelf in shelves] == [[[70], [73]], [], [[72], [75]]]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
