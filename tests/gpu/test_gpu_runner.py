"""The GPU runner driven step by step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from sidestep.executor.attention.halves import Halves
from sidestep.executor.attention.triton_backend import TritonAttention
from sidestep.executor.gpu import token_sampler
from sidestep.executor.gpu.gpu_runner import GpuRunner
from sidestep.executor.models.decoder import Layer
from sidestep.executor.runner.runner import WorkerArgs
from sidestep.ipc.config_sections import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
from sidestep.ipc.model.model_spec import load_model_spec
from sidestep.kernels.attention.hopper import roped_product
from sidestep.kernels.experts import coded_row, experts_triton
from sidestep.kernels.ops.rms_norm import DoneProduct
from sidestep.kernels.products.hopper import row_products
from sidestep.kernels.triton import sampling_triton
from sidestep.kernels.unfinished_product import PendingProduct
from tests.e2e.models import load_reference, random_prompts, write_model
from tests.quantized.whole_numbers import awq, awq_config
from tests.quantized.written import Case, only_layers, write
from tests.unit.executor.steps import Request, schedule, windows_of

pytestmark = pytest.mark.gpu
VOCAB = 257
needs_hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
    reason="needs a Hopper GPU",
)


def make_runner(
    path: str, dtype: str, quantization: str | None = None, rows: int = 64, **parallel: Any
) -> GpuRunner:
    runner = GpuRunner(
        WorkerArgs(
            rank=0,
            spec=load_model_spec(path, quantization=quantization),
            model=ModelConfig(model=path, dtype=dtype, quantization=quantization),
            cache=CacheConfig(block_size=16, num_kv_blocks=600 + 6 * rows),
            parallel=ParallelConfig(device="cuda", **parallel),
            scheduler=SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=max(256, 2 * rows)),
            max_model_len=256,
        )
    )
    return runner


@pytest.fixture
def logits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """Collect the logits that each eager step gives to the sampler."""
    seen: list[torch.Tensor] = []
    sample = sampling_triton.sample_tokens

    def spy(values: torch.Tensor, **others: Any) -> None:
        seen.append(values.float().clone())
        sample(values, **others)

    monkeypatch.setattr(token_sampler, "sample_tokens", spy)
    yield seen


def check_rounding(path: str, logits: list[torch.Tensor]) -> None:
    """Compare distances from float32 arithmetic on the same weights, in bfloat16."""
    prompts = random_prompts(12, VOCAB, longest=40)
    to_gpu: Any = PreTrainedModel.cuda  # without types
    theirs, exact = to_gpu(load_reference(path, torch.bfloat16)), to_gpu(load_reference(path))
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.copy_(parameter.bfloat16())
    runner = make_runner(path, "bfloat16", enforce_eager=True)
    ours = []
    for prompt in prompts:
        for step, _ in schedule([Request(prompt, 1)], 64, 16, windows_of(runner)):
            runner.execute(step).wait()
        ours.append(logits[-1])
    with torch.inference_mode():
        expected = torch.cat([exact(torch.tensor([p]).cuda()).logits[0, -1:] for p in prompts])
        reference = torch.cat(
            [theirs(torch.tensor([p]).cuda()).logits[0, -1:].float() for p in prompts]
        )
    assert (torch.cat(ours) - expected).square().mean() < 1.2 * (
        reference - expected
    ).square().mean()


@pytest.mark.parametrize("family", ["llama-gqa", "mistral-window", "qwen3-tied"])
def test_bfloat16_rounds_no_more_than_transformers(
    family: str, tmp_path: Path, logits: list[torch.Tensor]
) -> None:
    check_rounding(write_model(family, tmp_path), logits)


@needs_hopper
@pytest.mark.parametrize(
    ("family", "head_dim"), [("llama-gqa", 64), ("qwen3-tied", 128), ("mistral-window", 128)]
)
def test_so_do_products_of_many_rows_that_end_in_more(
    family: str,
    head_dim: int,
    tmp_path: Path,
    logits: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Let them take any number of rows, and tiles that are hardly filled."""
    monkeypatch.setattr(row_products, "_LEAST_ROWS", 1)
    monkeypatch.setattr(row_products, "_LEAST_FILLED", 0.0)
    projected = []

    def recorded(qkv: PendingProduct, *others: Any) -> torch.Tensor:
        projected.append(len(qkv.x))
        return project(qkv, *others)

    project = roped_product.project
    monkeypatch.setattr(roped_product, "project", recorded)
    check_rounding(write_model(family, tmp_path, head_dim=head_dim), logits)
    assert sum(projected) >= 12


@needs_hopper
def test_experts_of_one_row_compute_the_product_behind(
    tmp_path: Path, logits: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the bits of the product's own kernel, from layer to layer and step to step."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "intermediate_size": 256}
    path = write_model("qwen3-moe", tmp_path, head_dim=64, **sizes)
    multiply, done, found = coded_row.multiply_row, list[bool](), []

    def recorded(*operands: Any, **others: Any) -> Any:
        made = multiply(*operands, **others)
        done.append(isinstance(made, DoneProduct))
        return made

    monkeypatch.setattr(experts_triton, "multiply_row", recorded)
    for behind in (True, False):
        if not behind:
            monkeypatch.setattr(Layer, "precede", lambda *_: None)
        runner = make_runner(path, "bfloat16", "fp8", enforce_eager=True)
        request = Request(range(1, 31), 20)
        done.clear()
        logits.clear()
        for step, sampling in schedule([request], 64, 16, windows_of(runner)):
            collect(runner.execute(step), sampling)
        assert sum(done) == 2 * 19 * behind, "two layers have experts before a layer"
        found.append((request.output, torch.cat(logits)))
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])


@needs_hopper
@pytest.mark.parametrize("eager", [True, False])
def test_a_step_in_halves_computes_what_a_whole_one_does(
    eager: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare tokens: attention adds in another order, so a few may differ."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    case = Case(awq_config(128), only_layers(awq(128)), changes=sizes)
    path = write(case, tmp_path).quantized
    through, split, answers = Halves.through, list[int](), []

    def recorded(self: Halves, *operands: Any) -> Any:
        split.append(1)
        return through(self, *operands)

    monkeypatch.setattr(Halves, "through", recorded)
    prompts = [[(7 * i + j) % VOCAB for j in range(1 + i % 9)] for i in range(220)]
    for context in (range(1 << 30), None):
        monkeypatch.setattr(
            TritonAttention,
            "split_context",
            lambda _, rows, context=context: context if rows >= 192 else None,
        )
        runner = make_runner(path, "bfloat16", rows=230, enforce_eager=eager)
        requests = [Request(prompt, 40) for prompt in prompts]
        for step, sampling in schedule(requests, 460, 16, windows_of(runner)):
            collect(runner.execute(step), sampling)
        answers.append([r.output for r in requests])
        assert len(split) > (30 if eager else 0) if context else not split
        split.clear()
    same = sum(a == b for a, b in zip(*answers, strict=True))
    assert same > 200, same


@pytest.mark.parametrize("eager", [False, True])
def test_steps_may_all_be_launched_before_any_output_is_read(eager: bool, tmp_path: Path) -> None:
    """Run two steps in flight, as the engine does.

    Ids never leave the device in between.
    """
    path = write_model("qwen2", tmp_path)
    prompts = random_prompts(20, VOCAB)
    answers = []
    for depth in (1, 2):
        runner = make_runner(path, "float32", enforce_eager=eager)
        requests = [
            Request(p, 9, temperature=[0.0, 0.9][i % 2], seed=i) for i, p in enumerate(prompts)
        ]
        flying: list[Any] = []
        for step, sampling in schedule(requests, 90, 16):
            flying.append((runner.execute(step), sampling))
            if len(flying) == depth:
                collect(*flying.pop(0))
        for pending in flying:
            collect(*pending)
        answers.append([r.output for r in requests])
    assert answers[0] == answers[1]
    assert all(len(output) == 9 for output in answers[0])


def collect(pending: Any, sampling: list[Request]) -> None:
    output = pending.wait()
    assert output.start_ns <= output.end_ns
    for request, token in zip(sampling, output.token_ids.tolist(), strict=True):
        request.output.append(token)
