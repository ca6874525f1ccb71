"""Streams of an engine on the fake device, which knows the right tokens, and its hosts."""

from __future__ import annotations

import asyncio

from sidestep import AsyncLLM, SamplingParams
from sidestep.executor.runner.fake import expected_tokens
from sidestep.ipc.params.sampling_params import RequestOutputKind
from tests.waiting import LIMIT_S


async def tokens_of(llm: AsyncLLM, prompt: list[int], count: int) -> list[int]:
    tokens: list[int] = []
    params = SamplingParams(
        max_tokens=count,
        temperature=0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    async for output in llm.generate(prompt, params):
        tokens += output.outputs[0].token_ids
    return tokens


def right(llm: AsyncLLM, prompt: list[int], count: int) -> list[int]:
    return expected_tokens(prompt, count, 0, llm.get_tokenizer().vocab_size)


async def check_streams(llm: AsyncLLM, count: int = 16, length: int = 60) -> None:
    """Run streams at once, and check the tokens of each."""
    prompts = [[i % 7 + 1] * 10 + [i] for i in range(count)]
    async with asyncio.timeout(LIMIT_S):
        found = await asyncio.gather(*(tokens_of(llm, prompt, length) for prompt in prompts))
    assert found == [right(llm, prompt, length) for prompt in prompts]


def placed(llm: AsyncLLM) -> dict[str, tuple[int, ...]]:
    return {host.name: host.replicas for host in llm.hosts}
