"""A worker looks for the same kernels that are compiled ahead for tensors without memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from triton.backends.nvidia import driver

from sidestep.executor.gpu.cuda_driver import has_driver
from sidestep.kernels.cuda.compiler import compiles
from tests.e2e.models import write_model
from tests.e2e.pooling_models import write_classifier
from tests.processes import PYTHON_PATH, ROOT

ALONE, IN_A_GROUP, IN_STAGES = (1, 1, 0), (2, 1, 4), (1, 3, 0)
"""Ranks, stages and drafts of a row."""
AS_WORKERS = (
    *("--dtype", "float32", "--load-format", "dummy", "--attention-backend", "triton"),
    *("--max-num-seqs", "40", "--max-num-batched-tokens", "200", "--max-model-len", "200"),
    "--skip-tokenizer-init",
)
"""Options of an engine whose workers are those of compile_ahead.py."""


def run(cache: Path, program: str, *arguments: str) -> str:
    """Run a program of this folder, and return what it has printed."""
    said, problems, status = end_of(cache, f"tests.triton.compiling.{program}", *arguments)
    assert status == 0, problems[-4000:]
    return said


def end_of(cache: Path, module: str, *arguments: str) -> tuple[str, str, int]:
    """Run a module, and return its output, its messages and its exit status.

    It runs without the interpreter, and with a lifeline, without which forks end.
    """
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {
        "TRITON_CACHE_DIR": str(cache),
        "TRITON_DEFAULT_FP_FUSION": "1",
        "PYTHONPATH": PYTHON_PATH,
    }
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    said, problems = process.stdout.read(), process.stderr.read()
    process.communicate()
    return said, problems, process.returncode


def kernels_of(
    model: str, cache: Path, *sizes: tuple[int, int, int]
) -> list[tuple[list[str], list[str]]]:
    """Return for each of the sizes the kernels for tensors without and with memory."""
    return [
        tuple(pair)
        for pair in json.loads(run(cache, "compile_ahead", model, "keys", json.dumps(sizes)))
    ]


def test_tensors_without_memory_need_the_same_kernels(tmp_path: Path) -> None:
    model = write_model("qwen3-tied", tmp_path / "model")
    cache = tmp_path / "cache"
    alone, in_a_group, in_stages = kernels_of(model, cache, ALONE, IN_A_GROUP, IN_STAGES)
    for (without, with_memory), own in (
        (alone, "_silu_mul"),
        (in_a_group, "_copy_drafts"),
        (in_stages, "_silu_mul"),
    ):
        assert {
            "_choose_tokens",
            "_decode",
            "_prefill",
            "_copy_blocks",
            "_mask_tokens",
            "_gemv",
            "_streamed",
            "_accept",
            own,
        } <= {key.split()[0] for key in without}
        assert without == with_memory
    assert any(key.startswith("_pushed") for key in in_a_group[0])
    assert not any(key.startswith("_match") for key in alone[0]), "there is no speculation"


def test_recurrent_layers_need_the_same_kernels(tmp_path: Path) -> None:
    layers = ["linear_attention", "full_attention", "linear_attention"]
    model = write_model("qwen3.5", tmp_path / "model", num_hidden_layers=3, layer_types=layers)
    sizes = ALONE, IN_A_GROUP, IN_STAGES
    for (_, _, drafts), (without, with_memory) in zip(
        sizes, kernels_of(model, tmp_path / "cache", *sizes), strict=True
    ):
        assert without == with_memory
        kernels = {key.split()[0] for key in without}
        assert {"_causal_conv", "_few_rows", "_chunk_systems", "_chunk_saves"} <= kernels
        assert ("_begin_states" in kernels) == bool(drafts)


@pytest.mark.parametrize("family", ["gemma4-moe", "gemma4-token-inputs"])
def test_layers_of_several_shapes_need_the_same_kernels(family: str, tmp_path: Path) -> None:
    """Cover sums over ranks that are normed before they are added."""
    model = write_model(family, tmp_path / "model")
    ((without, with_memory),) = kernels_of(model, tmp_path / "cache", IN_A_GROUP)
    assert without == with_memory


def test_a_model_that_pools_needs_no_sampler(tmp_path: Path) -> None:
    model = write_classifier("qwen3-tied", tmp_path / "model", 2)
    for without, with_memory in kernels_of(model, tmp_path / "cache", ALONE, IN_A_GROUP, IN_STAGES):
        assert without == with_memory
        kernels = {key.split()[0] for key in without}
        assert {"_prefill", "_rms_norm", "_copy_blocks"} <= kernels
        assert not kernels & {"_choose_tokens", "_mask_tokens", "_accept"}


def test_products_of_all_sizes_need_no_other_kernels(tmp_path: Path) -> None:
    """A kernel of 640 rows was compiled by the worker, which took four seconds of its start."""
    model = Path(write_model("llama-gqa", tmp_path / "model", num_hidden_layers=1))
    config = json.loads((model / "config.json").read_text())
    config |= {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
    config |= {"num_key_value_heads": 8, "head_dim": 128, "torch_dtype": "float16"}
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    config["quantization_config"] = awq | {"version": "gemm"}
    (model / "config.json").write_text(json.dumps(config))
    ahead, beside = json.loads(run(tmp_path / "cache", "compile_ahead", str(model), "sizes"))
    assert {"_wide_codes", "_streamed_codes"} <= {key.split()[0] for key in ahead}
    assert beside == []
    if compiles():
        in_cuda = "".join(key for key in ahead if key.startswith("(Form("))
        assert "tokens=96" in in_cuda and "dim=128, group=4, box=64" in in_cuda


def test_coded_matrices_without_memory_need_the_same_kernels(tmp_path: Path) -> None:
    without, with_memory = json.loads(run(tmp_path / "cache", "compile_quantized"))
    assert without == with_memory
    kernels = {key.split()[0] for key in without}
    own = {"_coded", "_streamed_codes", "_one_row_codes", "_wide_codes", "_wide_scaled"}
    rounded = {"_quantize_rows", "_scaled_product"}
    assert kernels == {*own, *rounded, "_rms_norm", "_silu_mul"}


@pytest.mark.skipif(
    hasattr(driver, "make_launcher") and not has_driver(),
    reason="this Triton links what launches kernels to the driver's library",
)
def test_a_worker_finds_all_in_the_cache(tmp_path: Path) -> None:
    model = write_model("qwen3-tied", tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    # With this size one sampler is enough for all rows.
    config.write_text(json.dumps({**json.loads(config.read_text()), "vocab_size": 320}))
    run(tmp_path / "cache", "compile_ahead", model, "ahead")
    kernels = json.loads(run(tmp_path / "cache", "compile_ahead", model, "worker"))
    assert {"_choose_tokens", "_decode", "_prefill", "_copy_blocks", "_mask_tokens"} <= {
        name for name, _ in kernels
    }
    assert [name for name, found in kernels if not found] == []


@pytest.mark.skipif(
    hasattr(driver, "make_launcher") and not has_driver(),
    reason="this Triton links what launches kernels to the driver's library",
)
def test_an_engine_finds_what_the_command_has_compiled(tmp_path: Path) -> None:
    """Compile in a process that has no GPU, as for an image; a start then compiles nothing."""
    model, cache = write_model("qwen3-tied", tmp_path / "model"), tmp_path / "cache"
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "vocab_size": 320}))
    _, messages, status = end_of(
        cache, "sidestep", "compile-kernels", model, "--capability", "90", *AS_WORKERS
    )
    assert status == 0, messages
    assert f"kernels for sm_90 are in {cache}" in messages
    kernels = json.loads(run(cache, "compile_ahead", model, "worker"))
    assert [name for name, found in kernels if not found] == []
    # The process beside a starting worker does not even look at them one by one.
    assert run(cache, "compile_ahead", model, "holds", *AS_WORKERS) == "true\n"


def test_kernels_that_cannot_be_compiled_are_a_failure_with_a_cause(tmp_path: Path) -> None:
    model = write_model("qwen3-tied", tmp_path / "model")
    (tmp_path / "file").write_text("this is no folder")
    _, messages, status = end_of(
        *(tmp_path / "file", "sidestep", "compile-kernels", model, "--capability", "90"),
        *AS_WORKERS,
    )
    assert status == 1
    assert "sidestep: the kernels cannot be compiled: FileExistsError" in messages
    _, messages, status = end_of(
        *(tmp_path, "sidestep", "compile-kernels", model, "--capability", "90", "--device", "cpu"),
    )
    assert status == 1 and messages.splitlines()[-1].startswith("sidestep: device: 'cpu' has no")
