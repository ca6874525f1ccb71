"""A GPU's worker after a fault in a step: requests go on, with captured graphs and without."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.recovery.breaker import TARGET as BREAKER
from sidestep import LLM, AsyncLLM, EngineArgs, RequestError, RequestOutputKind, SamplingParams
from tests.e2e.models import random_prompts, write_model
from tests.e2e.output.failing_processor import TARGET

pytestmark = pytest.mark.gpu
PROMPTS = random_prompts(9, 331)


def params(plan: dict[str, Any] | None = None) -> list[SamplingParams]:
    """Return the parameters of PROMPTS; the last request has the plan."""
    plain: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "temperature": 0}
    extra = {"FailingProcessor": plan or {}}
    return [*[SamplingParams(**plain)] * 8, SamplingParams(**plain, extra_args=extra)]


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}], ids=["graphs", "eager"])
def test_requests_go_on_and_the_one_to_blame_ends_alone(
    options: dict[str, Any], model_folder: Path
) -> None:
    path = write_model("llama-gqa", model_folder)
    options = {"dtype": "float32", "num_kv_blocks": 256, "logits_processors": [TARGET], **options}
    tokens = []
    for plan in (None, {"in": "apply", "at": 5, "oom": True}, {"in": "sampled", "at": 5}):
        with LLM(path, **options) as llm:
            outputs = llm.generate(PROMPTS, params(plan), use_tqdm=False)
            stats = llm.get_stats()
        assert stats["soft_resets_oom"] + stats["soft_resets_exception"] == (plan is not None)
        tokens.append([output.outputs[0].token_ids for output in outputs])
    assert tokens[1] == tokens[0] and tokens[2] == tokens[0]
    with LLM(path, **options) as llm:
        wrong = params({"in": "enter", "at": 0})[8]
        with pytest.raises(RequestError, match="ValueError: call 0 of enter fails"):
            llm.generate(PROMPTS[8], wrong, use_tqdm=False)
        outputs = llm.generate(PROMPTS[:8], params()[:8], use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == tokens[0][:8]


def test_streams_go_on_after_a_kernel_has_trapped(model_folder: Path) -> None:
    """The device is of no use to that worker any more, so a new one takes its place."""
    path, file = write_model("llama-gqa", model_folder), model_folder / "break"
    options: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 256}
    args = EngineArgs(model=path, logits_processors=[BREAKER], **options)
    expected, found, restarts = asyncio.run(served_twice(args, file))
    assert restarts == {"worker": 1} and not file.exists()
    assert found == expected


async def served_twice(
    args: EngineArgs, file: Path
) -> tuple[list[list[int]], list[list[int]], Mapping[Any, int]]:
    """Return the tokens of PROMPTS, also of a run in which a kernel traps; and the restarts."""

    async def stream(index: int, breaks: bool) -> list[int]:
        some = SamplingParams(
            max_tokens=200,
            ignore_eos=True,
            temperature=0,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"Breaker": {"fault": "trap", "file": str(file)}} if index == 0 else None,
        )
        tokens, to_break = list[int](), breaks and index == 0
        async for output in llm.generate(PROMPTS[index], some):
            # On a busy host, an output may have several tokens.
            tokens += output.outputs[0].token_ids
            if to_break and len(tokens) >= 20:
                file.touch()
                to_break = False
        return tokens

    async with AsyncLLM.from_engine_args(args) as llm:
        runs = [
            await asyncio.gather(*(stream(i, breaks) for i in range(len(PROMPTS))))
            for breaks in (False, True)
        ]
        return runs[0], runs[1], llm.recovery.restarts
