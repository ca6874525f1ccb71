"""`sidestep topology`: its arithmetic against real models, and plans for absent machines."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from sidestep.executor.models.decoder import attention_shape
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.frontend.main import main
from sidestep.frontend.planning.machine import GpuInfo, Machine, bandwidth_of, count_links
from sidestep.frontend.planning.topology import Shard, Size, sizes
from sidestep.ipc.common import registry
from sidestep.ipc.config_sections import CacheConfig
from sidestep.ipc.model.kv.kv_cache_dtype import with_kv_cache_dtype
from sidestep.ipc.model.layer_spec import TokenInputSpec
from sidestep.ipc.model.layer_split import stage_of
from sidestep.ipc.model.model_spec import ModelSpec, load_model_spec
from tests.counting_weights import CountingWeights
from tests.fakes import make_spec

GIB = 1 << 30
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
"""The shape of Llama 3.1 8B."""


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Return a model's folder with nothing but a config.json."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("ranks", "layers"), [(1, (3,)), (2, (3,)), (4, (3,)), (8, (3,)), (1, (1, 1, 1)), (2, (2, 1))]
)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"mixer": {"bias": True}},
        {"mixer": {"head_norms": True}, "architecture": "Qwen3ForCausalLM"},
        {"mixer": {"bias": True, "output_bias": True}, "mlp": {"bias": True}},
    ],
    ids=str,
)
def test_weights_and_cache_are_those_that_ranks_of_the_real_model_take(
    ranks: int, layers: tuple[int, ...], changes: dict[str, Any]
) -> None:
    sizes = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 16, **changes.get("mixer", {})}
    mlp = {"width": 64, **changes.get("mlp", {})}
    fields = {"tie_word_embeddings": False, **changes, "mixer": sizes, "mlp": mlp}
    spec = make_spec(3, hidden_size=48, vocab_size=96, **fields)
    parallel = Parallel()
    parallel.size = ranks
    for index in range(len(layers)):
        stage, weights = stage_of(layers, index), CountingWeights()
        registry.load(registry.MODELS[spec.architecture].model)(spec, weights, parallel, stage)
        shard = Shard(spec, ranks, stage)
        assert shard.weights == weights.count
        shape = attention_shape(spec, parallel, stage)
        assert shard.kv_layout(4, 16) == shape.kv_layout(torch.float32, 16)


@pytest.mark.parametrize("tied", [True, False])
def test_the_stages_of_a_pipeline_hold_the_model_together(tied: bool) -> None:
    spec = make_spec(7, tie_word_embeddings=tied)
    whole = Shard(spec, 1, stage_of((7,), 0))
    stages = [Shard(spec, 1, stage_of((3, 3, 1), i)) for i in range(3)]
    table = spec.vocab_size * spec.hidden_size
    assert sum(s.weights for s in stages) == whole.weights + (table if tied else 0), (
        "both ends need the table"
    )
    assert sum(s.read for s in stages) == whole.read
    assert sum(s.kv_layout(2, 16).block_bytes for s in stages) == whole.kv_layout(2, 16).block_bytes


def sizes_on(
    spec: ModelSpec, count: int, memory: int, **more: Any
) -> dict[tuple[int, int, int], Size]:
    options: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": 8192,
        "cache": CacheConfig(),
        **more,
    }
    machine = Machine([GpuInfo("H200", memory, 4.8e12)] * count, {}, 8, 64 * GIB)
    return {
        (s.tensor_parallel_size, s.pipeline_parallel_size, s.data_parallel_size): s
        for s in sizes(spec, machine, **options)
    }


def test_a_model_of_one_stage_is_planned_with_one_and_its_table_shared_out() -> None:
    inputs = TokenInputSpec(width=16, vocab_size=96)
    layer = msgspec.structs.replace(make_spec().layers[0], token_input=inputs)
    spec = make_spec(hidden_size=48, vocab_size=96)
    spec = msgspec.structs.replace(spec, layers=(layer,) * 4)
    stages = {stages for _, stages, _ in sizes_on(spec, 4, 80 * GIB)}
    assert stages == {1}
    whole, half = (Shard(spec, ranks, stage_of((4,), 0)) for ranks in (1, 2))
    assert whole.weights - half.weights >= 48 * 4 * 16  # half of the table's rows


def test_the_8b_shape_on_known_gpus(model: str) -> None:
    spec = load_model_spec(model)
    found = sizes_on(spec, 8, 141 * GIB)
    assert set(found) == {
        (tp, pp, 8 // tp // pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8) if tp * pp <= 8
    }
    alone, split = found[1, 1, 8], found[8, 1, 1]
    assert alone.weight_bytes == 8_030_261_248 * 2
    # A token reads all but the embedding's rows: 15.01 GB at 4.8 TB/s.
    assert alone.token_floor_ms is not None
    assert alone.token_floor_ms == pytest.approx((8_030_261_248 - 128256 * 4096) * 2 / 4.8e9)
    assert split.token_floor_ms == pytest.approx(alone.token_floor_ms / 8, rel=0.01)
    assert found[1, 8, 1].token_floor_ms == pytest.approx(alone.token_floor_ms)
    # Each token takes 128 KiB of the rest of 92% beside the weights, less some for the largest
    # step.
    room = (0.92 * 141 * GIB - alone.weight_bytes) / (128 * 1024)
    assert 0.95 * room < alone.cache_tokens < room and alone.cache_tokens % 64 == 0
    assert alone.cache_tokens_in_all == 8 * alone.cache_tokens and alone.fits
    assert alone.full_step_floor_ms == pytest.approx(
        alone.token_floor_ms + alone.cache_tokens * 128 * 1024 / 4.8e9
    )


@pytest.mark.parametrize(
    ("dtype", "factor"),
    [("fp8", 256 / 130), ("int8", 256 / 130), ("int4_per_token_head", 256 / 68)],
)
def test_codes_leave_room_for_more_tokens(model: str, dtype: str, factor: float) -> None:
    plain = load_model_spec(model)
    coded = with_kv_cache_dtype(plain, dtype)
    found, more = (sizes_on(spec, 1, 141 * GIB)[1, 1, 1] for spec in (plain, coded))
    assert more.cache_tokens == pytest.approx(factor * found.cache_tokens, rel=0.001)
    assert factor > 1.9, "heads of 128"
    half = with_kv_cache_dtype(plain, dtype, [str(i) for i in range(16)])
    some = sizes_on(half, 1, 141 * GIB)[1, 1, 1].cache_tokens
    assert found.cache_tokens < some < more.cache_tokens


def test_what_is_too_small_says_so(model: str) -> None:
    spec = load_model_spec(model)
    small = sizes_on(spec, 4, 16 * GIB)
    assert small[1, 1, 4].cache_tokens == 0 and not small[1, 1, 4].fits
    assert small[4, 1, 1].fits and small[2, 2, 1].fits
    assert not sizes_on(spec, 4, 16 * GIB, max_model_len=131072)[2, 1, 2].fits, (
        "no request of the full length fits"
    )
    assert set(sizes_on(spec, 3, 141 * GIB)) == {(1, 1, 3), (1, 3, 1)}, "3 does not divide 32 heads"


def test_the_command_imagines_a_machine(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            ["topology", model, "--gpus", "2", "--gpu-memory", "141GiB", "--bandwidth", "4800GB/s"]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert "2 x imagined GPU, 141.0 GiB, 4,800 GB/s" in printed and "Times are floors" in printed
    assert "Least time a token: --tensor-parallel-size 2" in printed
    assert (
        main(
            [
                "topology",
                model,
                "--gpus",
                "2",
                "--gpu-memory",
                "141GiB",
                "--json",
                "--max-model-len",
                "8k",
            ]
        )
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert (told["max_model_len"], told["dtype"], told["machine"]["gpus"][0]["bandwidth"]) == (
        8192,
        "bfloat16",
        None,
    )
    assert [s["data_parallel_size"] for s in told["sizes"]] == [2, 1, 1]
    assert {s["token_floor_ms"] for s in told["sizes"]} == {None}


NVIDIA_SMI = r"""#!/bin/sh
case "$1" in
  --query-gpu=*)
    printf '0, GPU-aaaa, NVIDIA H200, 143771\n1, GPU-bbbb, NVIDIA H200, 143771\n'
    printf '2, GPU-cc, Tesla T4, 15360\n' ;;
  topo)
    printf '\t\033[4mGPU0\tGPU1\tGPU2\tCPU Affinity\033[0m\n'
    printf 'GPU0\t X \tNV18\tSYS\t0-9\nGPU1\tNV18\t X \tSYS\t0-9\n'
    printf 'GPU2\tSYS\tSYS\t X \t0-9\n\nLegend:\n  X = Self\n' ;;
esac
"""


@pytest.mark.parametrize(
    ("visible", "gpus", "links"),
    [
        (None, ["NVIDIA H200", "NVIDIA H200", "Tesla T4"], {"NV18": 1, "SYS": 2}),
        ("1,0", ["NVIDIA H200", "NVIDIA H200"], {"NV18": 1}),
        ("GPU-cc", ["Tesla T4"], {}),
        ("", [], {}),
    ],
)
def test_the_gpus_of_this_machine_are_found(
    visible: str | None,
    gpus: list[str],
    links: dict[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(NVIDIA_SMI)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert main(["topology", "--json"]) == 0
    machine = json.loads(capsys.readouterr().out)["machine"]
    assert [gpu["name"] for gpu in machine["gpus"]] == gpus and machine["links"] == links
    assert all(
        gpu["memory_bytes"] == 143771 << 20 and gpu["bandwidth"] == 4.8e12
        for gpu in machine["gpus"]
        if "H200" in gpu["name"]
    )


def test_a_machine_without_gpus_has_its_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["topology"]) == 0
    printed = capsys.readouterr().out
    assert (
        "GPUs: none found" in printed
        and "float32" in printed
        and "--gpus 8 --gpu-memory 141GiB" in printed
    )


@pytest.mark.parametrize(
    ("name", "speed"),
    [
        ("NVIDIA H200", 4.8e12),
        ("NVIDIA H100 80GB HBM3", 3.35e12),
        ("NVIDIA H100 PCIe", 2e12),
        ("NVIDIA H20", 4e12),
        ("NVIDIA A100-SXM4-40GB", 1.555e12),
        ("NVIDIA A100-SXM4-80GB", 2.039e12),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GeForce RTX 4090", 1.008e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA L4", 3e11),
    ],
)
def test_a_gpu_s_bandwidth_is_known_by_its_name(name: str, speed: float | None) -> None:
    assert bandwidth_of(name) == speed


def test_a_matrix_of_links_that_is_none_counts_none() -> None:
    assert count_links("", [0, 1]) == count_links("No devices were found", [0, 1]) == {}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--gpus", "0", "--gpu-memory", "1G"], "gpus: must be at least 1"),
        (["/nowhere"], "model: '/nowhere' is not a folder"),
        (["--max-model-len", "9k"], "max_model_len: 9216 is more"),
    ],
)
def test_what_cannot_be_told_is_one_line(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["topology", *words]) == 1
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 1 and line in shown[0]


def test_overrides_of_the_model_s_config_count(capsys: pytest.CaptureFixture[str]) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    overrides = json.dumps({"rope_scaling": yarn})
    assert main(["topology", "--json", "--hf-overrides", overrides]) == 0
    assert json.loads(capsys.readouterr().out)["max_model_len"] == 131072


def test_memory_must_be_given_where_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["topology", "--gpus", "8"]) == 1
    assert "gpu_memory: is needed" in capsys.readouterr().err


def test_layers_with_a_window_leave_room_for_more_long_requests() -> None:
    """Requests of 128k tokens keep all tokens in one layer of four, and a window in the others."""
    shape = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 128}
    all_full = make_spec(32, hidden_size=1024, vocab_size=96, mixer=shape)
    layers = tuple(
        layer
        if index % 4 == 3
        else make_spec(hidden_size=1024, mixer={**shape, "window": 4096}).layers[0]
        for index, layer in enumerate(all_full.layers)
    )
    with_windows = msgspec.structs.replace(all_full, layers=layers)
    full, windows = (
        sizes_on(spec, 1, 141 * GIB, max_model_len=1 << 17)[1, 1, 1].full_requests
        for spec in (all_full, with_windows)
    )
    # Windows and the longest row, beside the blocks of the layers that keep all.
    blocks, own = (1 << 17) // 64, (4095 + 33 * 256 + 2 * 1) // 64 + 2
    assert windows / full == pytest.approx(4 * blocks / (blocks + 3 * own), rel=0.02)
    assert windows > 3 * full
