"""Three ways to spend more tokens on a better answer when a request is served, as functions.

All completions of one call are choices of one request, so its prompt is computed once and its
blocks are shared. If one call follows another, its prompt begins with the last call's prompt, so
the prefix cache has that part.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sidestep.frontend.api.async_llm import AsyncLLM
from sidestep.frontend.input.prompts import Prompt
from sidestep.frontend.output.outputs import CompletionOutput, RequestOutput
from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.params.sampling_params import RequestOutputKind, SamplingParams

Score = Callable[[CompletionOutput], float | Awaitable[float]]
Conversation = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class BestOfN:
    """All completions, and the best one."""

    best: CompletionOutput
    scores: list[float]
    """The score of each of `output.outputs`."""
    output: RequestOutput


async def best_of_n(
    llm: AsyncLLM,
    prompt: Prompt,
    n: int,
    score: Score,
    sampling_params: SamplingParams | None = None,
) -> BestOfN:
    """Return the one of `n` completions that `score` rates highest; of equals the first.

    `score` may be a coroutine function: it may run tests, or ask another model that judges. The
    method pays where a good answer is easier to recognise than to give.

    Raises what `score` and AsyncLLM.generate raise.
    """
    output = await _last(llm, prompt, _params(llm, sampling_params, n))
    scores = list(
        await asyncio.gather(*(_value_of(score(completion)) for completion in output.outputs))
    )
    return BestOfN(output.outputs[scores.index(max(scores))], scores, output)


@dataclass(frozen=True)
class Vote:
    """The answer that most completions agree on."""

    answer: Hashable
    """The answer; None if no completion had one."""
    votes: Counter[Hashable]
    """Votes of the completions that were counted."""
    num_stopped: int
    """Completions that were ended early, because they could not change the result."""


async def self_consistency(
    llm: AsyncLLM,
    prompt: Prompt,
    n: int,
    answer_of: Callable[[str], Hashable],
    sampling_params: SamplingParams | None = None,
) -> Vote:
    """Return the answer that most of `n` completions end with (Wang et al. 2022).

    `answer_of` reads the answer from a completion's text; None for no answer, which is no vote.
    Completions that still run when no other answer can win are ended. If answers have equal votes,
    the first to have come wins. The method pays where many ways lead to one short answer.

    Raises what `answer_of` and AsyncLLM.generate raise.
    """
    states = await llm.start(prompt, _params(llm, sampling_params, n))
    readers = [asyncio.create_task(state.next_output()) for state in states]
    votes: Counter[Hashable] = Counter()
    num_read = 0
    try:
        for reader in asyncio.as_completed(readers):
            answer = answer_of((await reader).outputs[0].text)
            num_read += 1
            if answer is not None:
                votes[answer] += 1
            if _is_decided(votes, n - num_read):
                break
    finally:
        for task in readers:
            task.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        llm.leave(*states)
    return Vote(votes.most_common(1)[0][0] if votes else None, votes, n - num_read)


def _is_decided(votes: Counter[Hashable], num_left: int) -> bool:
    """Return whether the first answer leads by more votes than completions are left."""
    counts = [count for _, count in votes.most_common(2)]
    return bool(counts) and counts[0] - (counts[1] if len(counts) > 1 else 0) > num_left


@dataclass(frozen=True)
class Revision:
    """An answer, with the drafts and critiques that led to it."""

    answer: str
    drafts: list[str] = field(default_factory=list)
    """The drafts in the order in which they were written; the last is `answer`."""
    critiques: list[str] = field(default_factory=list)
    """One critique of each draft but the last.

    The last draft has one too if the critique found nothing.
    """


async def critique_and_revise(
    llm: AsyncLLM,
    messages: Conversation,
    *,
    rounds: int = 1,
    is_good: Callable[[str], bool] = lambda text: False,
    critique: str = "Name the mistakes of this answer.",
    revise: str = "Write the answer again, without them.",
    sampling_params: SamplingParams | None = None,
) -> Revision:
    """Let the model criticise its answer and write it again (Madaan et al. 2023).

    It does so up to `rounds` times. A critique that `is_good` takes to find nothing ends it. Each
    turn continues the conversation, so only its new part is computed. The method pays where the
    model sees its mistakes; it needs a model that follows instructions.

    Raises ValidationError, and what AsyncLLM.generate raises.
    """
    if rounds < 1:
        raise ValidationError("rounds", f"must be at least 1, not {rounds!r}")
    params, turns = _params(llm, sampling_params, 1), list(messages)

    async def say(request: str | None) -> str:
        if request is not None:
            turns.append({"role": "user", "content": request})
        text = (await _last(llm, turns, params)).outputs[0].text
        turns.append({"role": "assistant", "content": text})
        return text

    drafts, critiques = [await say(None)], list[str]()
    for _ in range(rounds):
        critiques.append(await say(critique))
        if is_good(critiques[-1]):
            break
        drafts.append(await say(revise))
    return Revision(drafts[-1], drafts, critiques)


def _params(llm: AsyncLLM, given: SamplingParams | None, n: int) -> SamplingParams:
    params = given if given is not None else llm.get_default_sampling_params()
    kind = RequestOutputKind.FINAL_ONLY
    return msgspec.structs.replace(params, n=n, best_of=None, output_kind=kind)


async def _last(llm: AsyncLLM, prompt: Prompt, params: SamplingParams) -> RequestOutput:
    async for output in llm.generate(prompt, params):
        pass
    return output


async def _value_of(score: float | Awaitable[float]) -> float:
    return float(await score if inspect.isawaitable(score) else score)
