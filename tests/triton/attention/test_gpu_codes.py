"""The GPU's runner with keys and values as codes gives the tokens of the CPU's.

Its kernels run in Triton's interpreter. One of the layers keeps the model's type, so blocks have
two sizes of memory.
"""

from __future__ import annotations

from dataclasses import replace
from shutil import copytree

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from sidestep.executor.cpu.cpu_runner import ModelRunner
from sidestep.executor.gpu.gpu_runner import GpuRunner
from sidestep.executor.runner.runner import WorkerArgs
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.model.kv.kv_cache_dtype import with_kv_cache_dtype
from sidestep.ipc.transport.worker_calls import MemoryUse, SentCall
from tests.e2e.models import random_prompts, write_model
from tests.triton.gpu_stand_in import standing_in, worker_args
from tests.triton.support import INTERPRETED
from tests.triton.test_gpu_runner import outputs
from tests.unit.executor.steps import Request, schedule
from tests.unit.executor.test_model_runner import VOCAB

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not INTERPRETED, reason="with a GPU, tests/gpu has the runner itself"),
    pytest.mark.filterwarnings(
        "ignore:(overflow|invalid value|divide by zero) encountered in:RuntimeWarning"
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    return write_model("llama-gqa", folder, num_hidden_layers=2, head_dim=16)


@pytest.fixture(scope="module")
def scaled_model(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the same model with scales of keys and values."""
    folder = tmp_path_factory.mktemp("scaled")
    copytree(model, folder, dirs_exist_ok=True)
    file = folder / "model.safetensors"
    own = "model.layers.0.self_attn"
    scales = {f"{own}.k_scale": torch.tensor(0.02), f"{own}.v_scale": torch.tensor(0.01)}
    save_file({**load_file(file), **scales}, file)
    return str(folder)


def coded(args: WorkerArgs, dtype: str) -> WorkerArgs:
    return replace(args, spec=with_kv_cache_dtype(args.spec, dtype, ["1"]))


@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("dtype", ["fp8", "int8", "int4_per_token_head"])
def test_steps_give_what_they_give_on_a_cpu(
    dtype: str, scales: bool, model: str, scaled_model: str
) -> None:
    if scales:
        if dtype != "fp8":
            return
        model = scaled_model
    args = coded(worker_args(model, enforce_eager=True), dtype)
    on_cpu = replace(args, parallel=replace(args.parallel, attention_backend="torch"))
    prompts = random_prompts(5, VOCAB, longest=20, seed=5)
    requests = [Request(prompt, 3, temperature=0.0) for prompt in prompts]
    steps = [step for step, _ in schedule(requests, 12, 16)]
    expected = [output.token_ids.tolist() for output in outputs(ModelRunner(on_cpu), steps)]
    with standing_in():
        runner = GpuRunner(args)
        got = [output.token_ids.tolist() for output in outputs(runner, steps)]
        use = runner.answer(SentCall(number=0, call=MemoryUse())).result
    assert got == expected and sum(map(len, got)) >= 15
    kept = [
        layer.mixer.kv().token_bytes(torch.float32.itemsize)  # type: ignore[union-attr]
        for layer in args.spec.layers
    ]
    assert kept[0] < kept[1] / 2
    assert use is not None and use["kv_cache"] == 30 * 16 * sum(kept)


def test_heads_whose_halves_do_not_fit_are_refused(model: str) -> None:
    args = coded(worker_args(model), "int4_per_token_head")
    layers = tuple(
        msgspec.structs.replace(one, mixer=msgspec.structs.replace(one.mixer, head_dim=24))
        for one in args.spec.layers
    )
    args = replace(
        args,
        spec=msgspec.structs.replace(args.spec, layers=layers),
        model=replace(args.model, load_format="dummy"),
    )
    with standing_in(), pytest.raises(EngineStartError, match="kv_cache_dtype: int4.*have 24"):
        GpuRunner(args)
