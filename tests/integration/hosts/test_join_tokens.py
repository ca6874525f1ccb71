"""The bundled model on two hosts gives the greedy tokens of one process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sidestep import AsyncLLM, EngineArgs, SamplingParams
from tests.integration.hosts.conftest import StartNode

PROMPTS = [f"def function_{i}(self, name):\n    " for i in range(8)]


async def answers(**options: object) -> list[list[int]]:
    """Return the greedy tokens of an engine for all prompts at once."""
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)

    async def answer(llm: AsyncLLM, prompt: str) -> list[int]:
        async for output in llm.generate(prompt, params):
            tokens = list(output.outputs[0].token_ids)
        return tokens

    given: dict[str, object] = {"device": "cpu", "cpu_threads": 1, **options}
    async with AsyncLLM.from_engine_args(EngineArgs(**given)) as llm:  # type: ignore[arg-type]
        return await asyncio.gather(*(answer(llm, prompt) for prompt in PROMPTS))


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"data_parallel_size": 2}, []),
        ({"pipeline_parallel_size": 2}, ["--max-ranks", "1"]),
    ],
    ids=["replicas", "stages"],
)
async def test_greedy_tokens_are_those_of_one_process(
    start_node: StartNode, invitation: Path, sizes: dict[str, int], words: list[str]
) -> None:
    for number in (2, 3):
        start_node(number, *words)
    found = await answers(
        placer="join",
        head_address="127.0.0.1:0",
        invitation_file=str(invitation),
        placer_timeout=60.0,
        **sizes,
    )
    assert found == await answers()
