"""A core whose messages cannot be read or used: its requests go on elsewhere, or end with that."""

from __future__ import annotations

import asyncio

import pytest

from sidestep import AsyncLLM, EngineDeadError
from sidestep.ipc.transport.channels import Broken
from sidestep.ipc.transport.messages import FinishReason, Outputs, ToFrontend, pack_ids, unpack_ids
from tests.unit.frontend.fakes import FakeChannel
from tests.unit.frontend.replicas.played import holder, last, turns

BAD: list[ToFrontend | Broken] = [
    Broken("a message of the engine core could not be read: at byte 3"),
    Outputs(handles=pack_ids([0]), token_ids=b"abc"),
    Outputs(handles=pack_ids([0]), token_ids=pack_ids([5]), logprobs=b"\xff" * 20),
]


def tokens_of(handle: int, *tokens: int) -> Outputs:
    return Outputs(handles=pack_ids([handle] * len(tokens)), token_ids=pack_ids(tokens))


@pytest.mark.parametrize("bad", BAD)
async def test_requests_go_on_elsewhere_from_the_tokens_that_came_before(
    llm: AsyncLLM, channels: list[FakeChannel], bad: ToFrontend | Broken
) -> None:
    stream = asyncio.create_task(last(llm, [5] * 40, seed=3))
    await turns()
    first = holder(channels, 0)
    first.say(tokens_of(0, 11, 12))
    await turns()
    first.say(bad)
    if first.is_open:
        first.say(tokens_of(0, 99))  # nothing that comes later is taken
    first.gone = True
    await turns()
    second = holder(channels, 0)
    (again,) = second.added
    assert unpack_ids(again.output_token_ids).tolist()[:2] == [11, 12]
    assert 99 not in unpack_ids(again.output_token_ids)
    assert not first.is_open, "the core must see that this frontend has left"
    second.say_tokens((0, 13), finished=[(0, FinishReason.LENGTH)])
    output = await stream
    assert output.outputs[0].token_ids[-1] == 13 and 99 not in output.outputs[0].token_ids


async def test_without_another_replica_the_error_says_what_was_wrong(
    llm: AsyncLLM, channels: list[FakeChannel]
) -> None:
    stream = asyncio.create_task(last(llm, [5] * 40))
    await turns()
    for channel in channels:
        channel.say(BAD[0])
    with pytest.raises(EngineDeadError, match="could not be read: at byte 3"):
        await stream
    assert llm.errored
