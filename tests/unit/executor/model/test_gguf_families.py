"""Every architecture of GGUF files: the model that is built is that of config.json and safetensors.

All weights are compared, so tests of whole engines (tests/e2e/quantization/test_gguf.py) need few
of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from sidestep.executor.attention.rotary import RotaryTable
from sidestep.executor.models.decoder import distinct_ropes
from sidestep.executor.models.model_loading import load_model
from sidestep.executor.models.weight_memory import weights_of
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.runner.runner import WorkerArgs
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.config_sections import (
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from sidestep.ipc.model.gguf.architectures import ARCHITECTURES as SUPPORTED
from sidestep.ipc.model.layer_spec import attention_of
from sidestep.ipc.model.model_spec import ModelSpec, load_model_spec
from tests.e2e.models import rope, write_model
from tests.gguf_files import ARCHITECTURES, library, write_gguf
from tests.quantized.loaded import decoded_matrices

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
LONG = rope(
    "longrope",
    attention_factor=1.2,
    short_factor=[1.0, 1.1, 1.3, 1.4],
    long_factor=[1.0, 2.0, 4.5, 5.0],
    partial_rotary_factor=0.5,
)
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
LLAMA3 = rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama-gqa", {}, {}),
    "llama with biases": ("llama-biases", {}, {}),
    "llama linear": (
        "llama-rope-linear",
        {},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "llama yarn": (
        "llama-rope-yarn",
        {},
        YARN | {"rope.scaling.original_context_length": 128},
    ),
    "llama3": ("llama-gqa", {"rope_parameters": LLAMA3}, {}),
    "qwen2": ("qwen2", {}, {}),
    "qwen3": ("qwen3-tied", {}, {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16, "tie_word_embeddings": True}, {}),
    "gemma3": (
        "gemma3",
        {
            "query_pre_attn_scalar": 16,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        },
        {"rope.freq_base": 1e6, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "phi3": ("phi3-window", {}, {}),
    "phi3 with factors": (
        "phi4-longrope",
        {},
        {
            "rope.dimension_count": 8,
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": 512,
            "rope.scaling.attn_factor": 1.2,
        },
    ),
    "glm4": ("glm4", {}, {"rope.dimension_count": 8}),
    "olmo2": ("olmo2", {}, {}),
    "granite": ("granite-tied", {}, {}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1]}, {}),
    "qwen2moe": (
        "qwen2-moe",
        {
            "mlp_only_layers": [],
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
        {},
    ),
    "qwen3moe": (
        "qwen3-moe",
        {"mlp_only_layers": [], "moe_intermediate_size": 32, "norm_topk_prob": True},
        {},
    ),
}
MAY_DIFFER = {"path", "architecture", "dtype", "quantization", "eos_token_ids"}


def built(spec: ModelSpec) -> dict[str, Tensor]:
    """Return all weights of the model on a CPU, in their plain layout."""
    args = WorkerArgs(
        rank=0,
        spec=spec,
        model=ModelConfig(model=spec.path),
        cache=CacheConfig(),
        parallel=ParallelConfig(device="cpu"),
        scheduler=SchedulerConfig(),
        max_model_len=64,
    )
    with decoded_matrices():
        weights = weights_of(load_model(args, Parallel(), torch.float32, torch.device("cpu")))
    return {
        name: weight.to_dense() if weight.is_mkldnn else weight for name, weight in weights.items()
    }


def test_every_supported_architecture_is_tested() -> None:
    assert set(ARCHITECTURES.values()) == set(SUPPORTED) <= {*FAMILIES}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_gguf_file_is_the_model_of_the_folder(name: str, tmp_path: Path) -> None:
    library()
    family, changes, metadata = FAMILIES[name]
    folder = tmp_path / "plain"
    extra: dict[str, Any] = {}
    if name == "phi3 with factors":
        changes = {"rope_parameters": LONG}
        extra = {
            f"rope_factors_{one}.weight": np.array(LONG[f"{one}_factor"], np.float32)
            for one in ("short", "long")
        }
    write_model(family, folder, **SIZES, **changes)
    if name == "llama3":
        spec = load_model_spec(str(folder))
        extra = {"rope_freqs.weight": llama3_factors(spec)}
    file = write_gguf(
        folder,
        tmp_path / "model.gguf",
        lambda stored: "Q8_0" if "attn_v" in stored else "Q4_0",
        metadata=metadata,
        extra=extra,
        rounded=tmp_path / "rounded",
    )
    found, expected = load_model_spec(str(file)), load_model_spec(str(tmp_path / "rounded"))
    for field, value in msgspec.structs.asdict(expected).items():
        if field not in MAY_DIFFER and not (name == "llama3" and field == "layers"):
            assert_alike(getattr(found, field), value)
    ours, theirs = built(found), built(expected)
    assert list(ours) == list(theirs)
    for path, weight in theirs.items():
        torch.testing.assert_close(ours[path], weight, rtol=1e-5, atol=1e-6, msg=path)
    for one, other in zip(tables(found), tables(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def assert_alike(found: Any, expected: Any) -> None:
    """Compare values whose numbers are float32 in the file."""
    if isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-6)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_alike(one, other)
    elif isinstance(expected, dict):
        assert set(found) == set(expected)
        for key, value in expected.items():
            assert_alike(found[key], value)
    elif isinstance(expected, msgspec.Struct):
        assert_alike(msgspec.structs.asdict(found), msgspec.structs.asdict(expected))
    else:
        assert found == expected


def tables(spec: ModelSpec) -> list[Tensor]:
    mixers = attention_of(spec.layers)
    device = torch.device("cpu")
    ropes = [RotaryTable(rope, dim, 100, device) for rope, dim in distinct_ropes(mixers)]
    return [value for one in ropes for value in vars(one).values() if isinstance(value, Tensor)]


def llama3_factors(spec: ModelSpec) -> Any:
    """Return how much slower each pair turns than without scaling."""
    mixer = attention_of(spec.layers)[0]
    assert mixer.rope is not None
    scaling, size = mixer.rope.scaling, mixer.head_dim
    speeds = mixer.rope.theta ** -(np.arange(0, size, 2) / size)
    lengths = 2 * np.pi / speeds
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    smooth = np.clip((original / lengths - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def test_a_part_of_a_rank_may_not_cut_a_group(tmp_path: Path) -> None:
    library()
    folder = tmp_path / "plain"
    write_model("llama-gqa", folder, **SIZES)
    file = write_gguf(folder, tmp_path / "model.gguf", lambda _: "Q4_0")
    parallel = Parallel()
    parallel.size = 4
    args = WorkerArgs(
        rank=0,
        spec=load_model_spec(str(file)),
        model=ModelConfig(model=str(file)),
        cache=CacheConfig(),
        parallel=ParallelConfig(device="cpu"),
        scheduler=SchedulerConfig(),
        max_model_len=64,
    )
    with pytest.raises(EngineStartError, match=r"self_attn\.o_proj cut a group of 32"):
        load_model(args, parallel, torch.float32, torch.device("cpu"))
