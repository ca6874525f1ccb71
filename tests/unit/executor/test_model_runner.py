"""The runner, driven step by step.

Greedy tokens equal those of transformers in any batch and chunking.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sidestep.executor.cpu.cpu_runner import ModelRunner
from sidestep.executor.runner.runner import WorkerArgs
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.config_sections import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
from sidestep.ipc.model.layer_spec import attention_of
from sidestep.ipc.model.model_spec import load_model_spec
from tests.e2e.models import FAMILIES, load_reference, random_prompts, reference_tokens, write_model
from tests.unit.executor.steps import Request, make_step, schedule, windows_of

VOCAB = 257
"""Size of the smallest family's vocabulary, so that prompts fit all families."""


pytestmark = pytest.mark.usefixtures("one_thread")


def make_runner(
    path: str, block_size: int = 16, num_kv_blocks: int | None = 1200, **changes: Any
) -> ModelRunner:
    """Return a loaded runner of one rank on the CPU."""
    model = {
        "dtype": "float32",
        **{k: changes.pop(k) for k in ("dtype", "load_format") if k in changes},
    }
    args: dict[str, Any] = {
        "rank": 0,
        "spec": load_model_spec(path),
        "model": ModelConfig(model=path, **model),
        "cache": CacheConfig(block_size=block_size, num_kv_blocks=num_kv_blocks),
        "parallel": ParallelConfig(device="cpu"),
        "max_model_len": 256,
        "scheduler": SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=512),
    }
    return ModelRunner(WorkerArgs(**{**args, **changes}))


def run(
    runner: ModelRunner, requests: Sequence[Request], budget: int = 64, block_size: int = 16
) -> list[list[int]]:
    """Run all requests to their ends."""
    for step, sampling in schedule(requests, budget, block_size, windows_of(runner)):
        output = runner.execute(step).wait()
        assert output.step_id == step.step_id
        assert output.start_ns <= output.end_ns
        for request, token in zip(sampling, output.token_ids.tolist(), strict=True):
            request.output.append(token)
    return [request.output for request in requests]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers_in_batches_of_1_to_64(
    family: str, tmp_path: Path
) -> None:
    path = write_model(family, tmp_path)
    prompts = random_prompts(64, VOCAB, longest=60)
    counts = [3 + i % 6 for i in range(64)]
    expected = reference_tokens(load_reference(path), prompts[:12], counts[:12])
    runner = make_runner(path, block_size=8)
    for size, budget in ((1, 7), (12, 33), (64, 90)):
        got = run(
            runner, [Request(p, n) for p, n in zip(prompts[:size], counts, strict=False)], budget, 8
        )
        assert got[:12] == expected[:size], f"in a batch of {size}"


def test_seeded_requests_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    runner = make_runner(write_model("llama-gqa", tmp_path))

    def requests() -> list[Request]:
        return [
            Request(
                p,
                12,
                temperature=[1.0, 0.0, 0.8, 1.5][i % 4],
                top_k=[0, 0, 7][i % 3],
                top_p=[1.0, 0.8][i % 2],
                seed=1000 + i,
            )
            for i, p in enumerate(random_prompts(10, VOCAB))
        ]

    alone = [run(runner, [request])[0] for request in requests()]
    assert run(runner, requests(), budget=17) == alone
    assert run(runner, requests(), budget=500) == alone


def test_tokens_are_taken_from_the_device_when_nobody_waits(tmp_path: Path) -> None:
    """Launch all steps before any output is read."""
    runner = make_runner(write_model("qwen2", tmp_path))
    prompts = random_prompts(6, VOCAB)
    expected = run(runner, [Request(p, 8) for p in prompts])
    requests = [Request(p, 8) for p in prompts]
    steps = schedule(requests, 40, 16, windows_of(runner))
    launched = [(runner.execute(step), sampling) for step, sampling in steps]
    for pending, sampling in launched:
        for request, token in zip(sampling, pending.wait().token_ids.tolist(), strict=True):
            request.output.append(token)
    assert [r.output for r in requests] == expected


def test_a_step_in_which_nothing_samples_gives_no_tokens(tmp_path: Path) -> None:
    runner = make_runner(write_model("llama-gqa", tmp_path))
    output = runner.execute(make_step([(0, 4, [0])], {0: Request([1] * 9, 1)})).wait()
    assert output.token_ids.tolist() == []


def test_a_cached_prefix_gives_the_same_tokens(tmp_path: Path) -> None:
    runner = make_runner(write_model("llama-gqa", tmp_path), block_size=4)
    prompt = random_prompts(1, VOCAB, seed=9)[0][:23] or [1]
    prompt = (prompt * 23)[:23]
    first = (
        runner.execute(make_step([(0, 23, range(6))], {0: Request(prompt, 1)}))
        .wait()
        .token_ids.tolist()
    )
    again = Request(prompt, 1, num_computed=20)
    second = (
        runner.execute(make_step([(1, 3, [0, 1, 2, 3, 4, 9])], {1: again}))
        .wait()
        .token_ids.tolist()
    )
    assert first == second


def test_bad_checkpoints_say_what_is_wrong(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = write_model("llama-gqa", tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    for change, message in (
        ({name: None}, rf"lacks {name}"),
        ({name: torch.ones(3, 3)}, rf"{name} has shape \[3, 3\]"),
        ({"model.layers.0.extra.weight": torch.ones(1)}, r"model\.layers\.0\.extra\.weight"),
    ):
        tensors = {k: v for k, v in {**whole, **change}.items() if v is not None}
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(EngineStartError, match=message):
            make_runner(path)


def test_the_cache_is_as_large_as_asked_useful_or_possible(tmp_path: Path) -> None:
    path = write_model("llama-gqa", tmp_path)
    spec = load_model_spec(path)
    token_bytes = 4 * sum(2 * one.num_kv_heads * one.head_dim for one in attention_of(spec.layers))

    def blocks(**cache: Any) -> int:
        args = WorkerArgs(
            rank=0,
            spec=spec,
            model=ModelConfig(model=path, dtype="float32"),
            cache=CacheConfig(**cache),
            parallel=ParallelConfig(device="cpu"),
            max_model_len=100,
            scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
        )
        return ModelRunner(args).ready.num_kv_blocks

    assert blocks(num_kv_blocks=5) == 5
    assert blocks() == 4 * 7, "four rows of 100 tokens need no more"
    assert blocks(kv_cache_memory_bytes=token_bytes * 16 * 3 + 1) == 3
    with pytest.raises(EngineStartError, match="do not hold one block"):
        blocks(kv_cache_memory_bytes=token_bytes * 15)


@pytest.mark.parametrize(("dtype", "expected"), [("float16", "float32"), ("float32", "float32")])
def test_auto_dtype_on_a_cpu(dtype: str, expected: str, tmp_path: Path) -> None:
    import json

    path = write_model("llama-gqa", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
    runner = make_runner(path, dtype="auto")
    assert expected in runner.ready.device


@pytest.mark.parametrize("family", ["llama-gqa", "mistral-window", "qwen3-tied"])
def test_bfloat16_rounds_no_more_than_transformers(family: str, tmp_path: Path) -> None:
    """Compare distances from float32 arithmetic on the same weights.

    Tokens would be the wrong measure: the logits of these models lie a few bfloat16 steps apart,
    and transformers' own two attention implementations agree on as few as 9 of 24 answers.
    """
    path, prompts = write_model(family, tmp_path), random_prompts(12, VOCAB, longest=40)
    theirs, exact = load_reference(path, torch.bfloat16), load_reference(path)
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.copy_(parameter.bfloat16())
    runner = make_runner(path, dtype="bfloat16")
    ours = torch.cat([last_logits(runner, prompt) for prompt in prompts])
    with torch.inference_mode():
        expected = torch.cat([exact(torch.tensor([p])).logits[0, -1:] for p in prompts])
        reference = torch.cat([theirs(torch.tensor([p])).logits[0, -1:].float() for p in prompts])
    assert (ours - expected).square().mean() < 1.2 * (reference - expected).square().mean()


def last_logits(runner: ModelRunner, prompt: Sequence[int]) -> torch.Tensor:
    """Return the logits after a prompt, float32 [1, V]."""
    seen: list[torch.Tensor] = []
    assert runner._last is not None
    last, sampler = runner._last, runner._last.sampler

    class Spy:
        def __call__(self, logits: torch.Tensor, *rows: Any) -> torch.Tensor:
            seen.append(logits.float().clone())
            return sampler(logits, *rows)

    last.sampler = Spy()  # type: ignore[assignment]  # called as the sampler is
    try:
        run(runner, [Request(prompt, 1)])
    finally:
        last.sampler = sampler
    return seen[-1]


def test_a_request_sees_nothing_of_the_one_before_it_in_its_slot(tmp_path: Path) -> None:
    """Check that state belongs to a request, not to a slot.

    The second prompt is as long as the first request was when it ended, so that by slot and length
    alone its first token looks like the first one's next.
    """
    path = write_model("llama-gqa", tmp_path)
    prompts = [random_prompts(1, VOCAB, seed=seed)[0] * 20 for seed in (1, 2)]
    first, second = Request(prompts[0][:10], 8), Request(prompts[1][:17], 6)
    both = [list(first.prompt), list(second.prompt)]
    expected = reference_tokens(load_reference(path), both, [8, 6])
    runner = make_runner(path)
    assert [run(runner, [request])[0] for request in (first, second)] == expected


def test_a_request_that_enters_with_one_token_left_sees_only_its_own_prefix(tmp_path: Path) -> None:
    """Let a request enter as a row of one token: all but its last token are cached."""
    runner = make_runner(write_model("llama-gqa", tmp_path), block_size=4)
    prompts = [(random_prompts(1, VOCAB, seed=seed)[0] * 20)[:9] for seed in (1, 2)]
    # The second prompt's KV comes to lie in blocks 6 to 8, and its next token is known from there.
    expected = (
        runner.execute(make_step([(5, 9, [6, 7, 8])], {5: Request(prompts[1], 2)}))
        .wait()
        .token_ids.tolist()
    )
    # The first request, in slot 0, has 8 tokens in the cache when it ends, the last of them by a
    # step of one token.
    runner.execute(make_step([(0, 7, [0, 1])], {0: Request(prompts[0][:7], 2)}))
    runner.execute(make_step([(0, 1, [])]))
    again = Request(prompts[1], 1, num_computed=8)
    assert (
        runner.execute(make_step([(0, 1, [6, 7, 8])], {0: again})).wait().token_ids.tolist()
        == expected
    )
