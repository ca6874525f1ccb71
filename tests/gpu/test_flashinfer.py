"""The runner with attention by FlashInfer, on a model with and without windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config

from sidestep import LLM, EngineStartError
from sidestep.executor.attention.flashinfer_backend import FlashInferAttention
from sidestep.executor.gpu import token_sampler
from sidestep.kernels.triton import sampling_triton
from tests.e2e.models import COMMON, FAMILIES, load_reference, random_prompts, write_model
from tests.gpu.test_gpu_runner import collect, make_runner
from tests.unit.executor.steps import Request, schedule

MISSING = FlashInferAttention.missing(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
# FlashInfer compiles its kernels when they are first used.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    pytest.mark.timeout(600),
]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(
        FAMILIES,
        "large-heads",
        lambda: Qwen2Config(
            **{
                **COMMON,
                "head_dim": 128,
                "use_sliding_window": True,
                "sliding_window": 16,
                "max_window_layers": 1,
            }
        ),
    )
    return write_model("large-heads", tmp_path)


def test_bfloat16_rounds_no_more_than_transformers(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare distances from float32 arithmetic on the same weights."""
    ours: list[torch.Tensor] = []
    sample = sampling_triton.sample_tokens

    def spy(values: torch.Tensor, **others: Any) -> None:
        ours.append(values.float().clone())
        sample(values, **others)

    monkeypatch.setattr(token_sampler, "sample_tokens", spy)
    prompts = random_prompts(12, 331, longest=40)
    to_gpu: Any = PreTrainedModel.cuda  # without types
    theirs, exact = to_gpu(load_reference(path, torch.bfloat16)), to_gpu(load_reference(path))
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.copy_(parameter.bfloat16())
    runner = make_runner(path, "bfloat16", attention_backend="flashinfer")
    got = []
    for prompt in prompts:
        for step, _ in schedule(
            [Request(prompt, 1)], 17, 16
        ):  # in chunks, some of them of one token
            runner.execute(step).wait()
        got.append(ours[-1])
    with torch.inference_mode():
        expected = torch.cat([exact(torch.tensor([p]).cuda()).logits[0, -1:] for p in prompts])
        reference = torch.cat(
            [theirs(torch.tensor([p]).cuda()).logits[0, -1:].float() for p in prompts]
        )
    assert (torch.cat(got) - expected).square().mean() < 1.2 * (
        reference - expected
    ).square().mean()


def test_a_plan_does_not_overwrite_that_of_the_step_in_flight(path: str) -> None:
    prompts = random_prompts(40, 331)
    answers = []
    for depth in (1, 2, 3):
        runner = make_runner(path, "bfloat16", attention_backend="flashinfer")
        requests = [Request(p, 9) for p in prompts]
        flying: list[Any] = []
        for step, sampling in schedule(requests, 90, 16):
            flying.append((runner.execute(step), sampling))
            if depth > 1:
                # While this runs, the step's kernels still wait when the next step is planned.
                torch.cuda._sleep(2_000_000)
            if len(flying) == depth:
                collect(*flying.pop(0))
        for pending in flying:
            collect(*pending)
        answers.append([r.output for r in requests])
    assert answers[0] == answers[1] == answers[2]


def test_float32_is_refused_at_the_start(path: str) -> None:
    with pytest.raises(EngineStartError, match="^dtype: .*flashinfer"):
        LLM(path, dtype="float32", attention_backend="flashinfer", kv_cache_memory_bytes=1 << 28)
