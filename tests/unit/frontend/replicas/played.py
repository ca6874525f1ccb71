"""Helpers for tests of replicas that a test plays."""

from __future__ import annotations

import asyncio
from typing import Any

from sidestep import AsyncLLM, RequestOutput, SamplingParams
from sidestep.frontend.routing.router import Router
from sidestep.ipc.transport.messages import Answer, Call, Dead, Outputs, Started
from tests.unit.frontend.fakes import FakeChannel

DEAD = Dead(cause="worker 0 was killed")


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def router_of(llm: AsyncLLM) -> Router:
    return llm._replicas._requests.router


async def last(llm: AsyncLLM, prompt: list[int], **sampling: Any) -> RequestOutput:
    async for output in llm.generate(prompt, SamplingParams(**{"max_tokens": 9, **sampling})):
        pass
    return output


def started(*handles: int) -> Outputs:
    return Outputs(
        handles=b"",
        token_ids=b"",
        started=[Started(handle=h, num_cached_tokens=0, scheduled=1.0) for h in handles],
    )


def holder(channels: list[FakeChannel], handle: int) -> FakeChannel:
    """Return the replica that has been sent a request last."""
    (found,) = [c for c in channels if not c.gone and any(m.handle == handle for m in c.added)]
    return found


def kill(channel: FakeChannel) -> None:
    channel.gone = True
    channel.say(DEAD)


def answer_calls(channels: list[FakeChannel], **results: list[float]) -> None:
    """Let each replica answer all calls with its own of these figures."""
    for number, channel in enumerate(channels):
        for call in [m for m in channel.sent if isinstance(m, Call)]:
            channel.sent.remove(call)
            channel.say(
                Answer(
                    call_id=call.call_id,
                    result={name: each[number] for name, each in results.items()},
                )
            )
