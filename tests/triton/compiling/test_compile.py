"""All kernels compile for GPUs in bfloat16 and as shipped, and fit them.

No GPU is needed. A kernel that runs in the interpreter may still not compile, or need more shared
memory than a GPU has. One more matrix, of rarer models, windows, blocks and GPUs, takes minutes:
pytest -m slow tests/triton.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sidestep.kernels.cuda.compiler import compiles
from tests.processes import PYTHON_PATH, ROOT

SHARED_KB = {80: 163, 89: 99, 90: 227, 100: 227}
"""KiB of shared memory that one program may have, by compute capability."""
STACK = {("_choose_tokens", 16): 128, ("_chunk_systems", 8): 64, ("_streamed_codes", 8): 160}
"""Bytes of a stack that some kernels may have, by their name and warps.

The sampler's filters keep a few values for the token's end beside their loops. The inverse of a
chunk's system takes all registers for a moment. So does the sum of the parts of two tiles of codes,
behind the loop.
"""
COMMON = {
    "_rms_norm",
    "_silu_mul",
    "_sigmoid_mul",
    "_copy_blocks",
    "_mask_logits",
    "_mask_tokens",
    "_prepare",
    "_score_tiles",
    "_choose_tokens",
    "_accept",
    "_match",
    "_copy_drafts",
}
MEETINGS = {"_pushed": 0, "_one_shot": 1, "_two_shot": 2}
ATTENTION = {"_qkv_rope", "_plan", "_decode", "_prefill"}
FEW = {"_plan_few", "_decode_few"}
FEW_MODELS = ("Qwen3-0.6B", "Llama-3.1-8B", "Qwen2.5-0.5B", "Gemma-like")
"""Models whose heads the kernel of few rows takes, on Hopper and later."""
PRODUCTS = {
    80: {"_gemv", "_skinny"},
    89: {"_gemv", "_skinny"},
    90: {"_gemv", "_skinny", "_streamed", "_gated_gemm"},
    100: {"_gemv", "_skinny", "_gated_gemm"},
}
"""Kernels of products by compute capability; the streamed product is for Hopper alone."""


EXPERTS = {
    "_rms_norm",
    "_router_product",
    "_router_rows",
    "_router_tiles",
    "_choose_experts",
    "_expert_gate_up",
    "_expert_down",
    "_combine",
    "_coded_gate_up",
    "_coded_down",
    "_coded_sorted_down",
}
REGISTER_EXPERTS = {"_register_gate_up", "_register_down", "_few_down"}
"""Kernels of a few pairs of coded experts, on Hopper and later."""
SORTED_EXPERTS = {90: {"_quantize_rows"}} if compiles() else {}
"""Kernels of sorted pairs by compute capability; where CUDA C++ multiplies, inputs are rounded."""
OTHER_SORTED_EXPERTS = {"_count_pairs", "_place_pairs", "_grouped_gate_up", "_grouped_down"}


QUANTIZED = {
    "_coded",
    "_decode_matrix",
    "_scaled_product",
    "_quantize_rows",
    "_rms_norm",
    "_silu_mul",
}


RECURRENT = {
    "_begin_states",
    "_causal_conv",
    "_few_rows",
    "_chunk_systems",
    "_chunk_scan",
    "_chunk_saves",
    "_gated_rms_norm",
}


@dataclass(frozen=True)
class Job:
    """One process that compiles."""

    capability: int
    model: str
    block_size: int = 64
    window: int = 0
    groups: tuple[str, ...] = ("common", "attention", "products")

    def __str__(self) -> str:
        groups = "-".join(self.groups)
        return f"sm_{self.capability}-{self.model}-{self.block_size}-{self.window}-{groups}"


MAIN = [
    Job(80, "Qwen3-0.6B", groups=("attention", "products", "codes")),
    Job(90, "Qwen3-0.6B", groups=("common", "sums", "attention", "products")),
    Job(90, "Llama-3.1-8B", groups=("attention", "products", "experts", "recurrent")),
    Job(90, "Llama-3.1-8B", groups=("codes",)),
    Job(90, "Llama-3.1-8B", groups=("quantized",)),
    Job(89, "Qwen3-0.6B", groups=("quantized",)),
]
SLOW = [
    Job(capability, model, block_size, window, ("attention",))
    for capability in SHARED_KB
    for model in ("Qwen3-0.6B", "Llama-3.1-8B", "Qwen2.5-0.5B", "Gemma-like", "Phi-like")
    for block_size, window in ((64, 0), (16, 1000), (48, 0))
]
SLOW += [Job(90, "Qwen3-0.6B", groups=("all-quantized",))]
SLOW += [
    Job(capability, "Gemma-4-like", block_size, window, ("attention",))
    for capability in SHARED_KB
    for block_size, window in ((64, 0), (48, 1000))
]
SLOW += [
    Job(capability, model, groups=("common", "sums", "products", "experts", "all-quantized"))
    for capability in SHARED_KB
    for model in ("Llama-3.1-8B", "Qwen2.5-0.5B", "Gemma-like")
]
SLOW += [
    Job(capability, model, block_size, window, ("codes",))
    for capability in SHARED_KB
    for model in ("Qwen3-0.6B", "Qwen2.5-0.5B", "Gemma-like")
    for block_size, window in ((64, 0), (16, 1000))
]


def run(job: Job, cache: Path) -> subprocess.CompletedProcess[str]:
    """Compile the kernels anew, with an empty cache and without the interpreter."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {
        "TRITON_CACHE_DIR": str(cache),
        "TRITON_DEFAULT_FP_FUSION": "1",
        "PYTHONPATH": PYTHON_PATH,
    }
    arguments = [job.capability, job.model, job.block_size, job.window, *job.groups]
    return subprocess.run(
        [sys.executable, "-m", "tests.triton.compiling.compile_kernels", *map(str, arguments)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run all main jobs, as many at a time as there are processors."""
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        yield {job: pool.submit(run, job, tmp_path_factory.mktemp("kernels")) for job in MAIN}


def check(job: Job, process: subprocess.CompletedProcess[str]) -> None:
    assert process.returncode == 0, process.stderr[-4000:]
    kernels = [json.loads(line) for line in process.stdout.splitlines()]
    for kernel in kernels:
        assert kernel["shared"] <= SHARED_KB[job.capability] * 1024, kernel
        if job.capability >= 90:
            # A kernel may spill four words at most, which the compiler may set aside over a loop to
            # fit one more program: there are no spills in the loop.
            most = STACK.get((kernel["kernel"], kernel["warps"]), 16)
            assert kernel.get("stack", 0) <= most, kernel
    few = job.capability >= 90 and job.model in FEW_MODELS and job.block_size % 32 == 0
    # Hopper has kernels of its own, but not for all forms.
    own = {"_streamed_codes", "_one_row_codes", "_wide_codes", "_wide_scaled", "_decode_words"}
    others = {"_coded", "_decode_matrix"}
    hopper = job.capability == 90
    expected = {
        "common": COMMON,
        "sums": set(MEETINGS),
        "attention": ATTENTION | (FEW if few else set()),
        "products": PRODUCTS[job.capability],
        "experts": EXPERTS
        | SORTED_EXPERTS.get(job.capability, OTHER_SORTED_EXPERTS)
        | (REGISTER_EXPERTS if job.capability >= 90 else set()),
        "quantized": (QUANTIZED - others) | own if hopper else QUANTIZED,
        "all-quantized": QUANTIZED | own if hopper else QUANTIZED,
        "recurrent": RECURRENT,
        "codes": {"_qkv_rope", "_decode", "_prefill"} | ({"_decode_codes"} | FEW if few else set()),
    }
    assert {kernel["kernel"] for kernel in kernels} == set().union(
        *(expected[group] for group in job.groups)
    )
    for kernel in kernels:
        meetings = MEETINGS.get(kernel["kernel"])
        if meetings is not None:
            assert kernel["releases"] == kernel["acquires"] == meetings, (
                "flags must be seen by other GPUs"
            )
        if meetings:
            assert kernel["wide_loads"] >= 4, "parts are read in pieces"
        if meetings == 0:
            assert kernel["pushes"] and kernel["polls"], (
                "words are written and read in pieces, or not as they are"
            )
            assert kernel["shared"] <= 128, "threads exchange words before they add them"
    if job.capability == 90:
        for kernel in kernels:
            if kernel["kernel"] in (
                "_prefill",
                "_gated_gemm",
                "_streamed",
                "_coded_gate_up",
                "_coded_down",
                "_coded_sorted_down",
                "_coded",
                "_scaled_product",
                "_chunk_systems",
                "_chunk_scan",
            ):
                # These instructions take 64 rows. A state of 512 values a row would not fit.
                wide = job.model == "Gemma-4-like"
                assert kernel["wgmma"] or wide, "the tensor cores are used as those of older GPUs"
            if kernel["kernel"] == "_one_shot" and "reg" in kernel:
                assert kernel["reg"] >= 4 * kernel["wide_loads"], (
                    "parts are asked for in turns, to save registers"
                )


# All jobs compile at once, and a slow machine has other tests beside them.
@pytest.mark.timeout(900)
@pytest.mark.parametrize("job", MAIN, ids=str)
def test_main_shapes(
    job: Job, running: dict[Job, Future[subprocess.CompletedProcess[str]]]
) -> None:
    check(job, running[job].result())


@pytest.mark.slow
@pytest.mark.parametrize("job", SLOW, ids=str)
def test_other_shapes(job: Job, tmp_path: Path) -> None:
    check(job, run(job, tmp_path))
