"""Scales of keys and values from checkpoints: they are the ones by which the cache rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sidestep.executor.attention.torch_layers import PlainBlocks
from sidestep.executor.models.decoder import DecoderForCausalLM
from sidestep.executor.models.weight_memory import weights_of
from sidestep.ipc.common.errors import EngineStartError, ValidationError
from sidestep.ipc.config_sections import ParallelConfig
from sidestep.ipc.model.kv.kv_cache_dtype import with_kv_cache_dtype
from sidestep.ipc.model.layer_spec import attention_of
from sidestep.ipc.model.model_spec import ModelSpec, load_model_spec
from sidestep.ipc.params.logits_controls import Controls
from tests.e2e.models import random_prompts, write_model
from tests.quantized.cases import FP8
from tests.quantized.loaded import loaded
from tests.quantized.written import state
from tests.unit.executor.steps import Request, schedule
from tests.unit.executor.test_model_runner import VOCAB, make_runner

pytestmark = pytest.mark.usefixtures("one_thread")

K, V = 2.0**-6, 2.0**-7
"""Scales by which some of the model's keys and values are too large for e4m3."""
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {},
        "kv_cache_scheme": SCHEME,
    },
    "modelopt": {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "exclude_modules": ["*"],
        "kv_cache_scheme": SCHEME,
    },
}
"""Configurations that ask for keys and values in e4m3, and leave all matrices plain."""


def write(folder: Path, scales: dict[str, Tensor], config: dict[str, Any] | None = None) -> str:
    """Write a model whose layers have these tensors, by their names within the attention."""
    path = write_model("llama-gqa", folder, num_hidden_layers=2)
    file = folder / "model.safetensors"
    named = {
        f"model.layers.{layer}.self_attn.{name}": tensor.clone()
        for layer in range(2)
        for name, tensor in scales.items()
    }
    save_file({**load_file(file), **named}, file)
    if config is not None:
        state(folder, config)
    return path


def pair(k: float, v: float) -> dict[str, Tensor]:
    return {"k_scale": torch.tensor(k), "v_scale": torch.tensor(v)}


def computed(path: str, spec: ModelSpec | None = None, budget: int = 12) -> list[bytes]:
    """Return all tokens and log-probabilities of some requests, as bytes."""
    # Codes have the torch backend; another one would round other bits.
    parallel = ParallelConfig(device="cpu", attention_backend="torch")
    runner = make_runner(path, parallel=parallel, spec=spec or load_model_spec(path))
    requests = [
        Request(prompt, 6, controls=Controls(logprobs=3, prompt_logprobs=2))
        for prompt in random_prompts(4, VOCAB, longest=30, seed=2)
    ]
    outputs = [runner.execute(step).wait() for step, _ in schedule(requests, budget, 16)]
    return [
        bytes(column)
        for output in outputs
        for column in (output.token_ids, output.logprobs, output.prompt_logprobs)
    ]


def with_dtype(path: str, dtype: str) -> ModelSpec:
    return with_kv_cache_dtype(load_model_spec(path), dtype)


@pytest.mark.parametrize(
    "scales",
    [
        pair(K, V),
        {"k_proj.k_scale": torch.tensor([K]), "v_proj.v_scale": torch.tensor([V])},
        {"k_proj.output_scale": torch.tensor([[K]]), "v_proj.output_scale": torch.tensor([[V]])},
        {"attn.k_scale": torch.tensor(K).bfloat16(), "attn.v_scale": torch.tensor(V).bfloat16()},
        {"k_scale": torch.full((2, 1, 1), K), "v_scale": torch.full((2,), V)},
    ],
    ids=["layer", "projection", "output", "attn", "head"],
)
def test_logits_are_those_of_keys_and_values_rounded_by_hand(
    scales: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, scales)
    got = computed(path, with_dtype(path, "fp8"))
    assert got != computed(path, with_dtype(path, "fp8_per_token_head"))
    plain = computed(path)
    write_plain, cut = PlainBlocks.write, []

    def round_and_write(self: PlainBlocks, kv: Tensor, slots: Tensor, given: Tensor) -> Tensor:
        keys, values = kv.float().chunk(2, 1)
        for part, scale in ((keys, K), (values, V)):
            cut.append(bool((part.abs() > 448 * scale).any()))
            codes = (part / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            part.copy_(codes.float() * scale)
        return write_plain(self, torch.cat([keys, values], 1), slots, given)

    monkeypatch.setattr(PlainBlocks, "write", round_and_write)
    assert got == computed(path) != plain
    assert any(cut), "no number is too large for its scale"


def test_one_old_scale_is_that_of_keys_and_of_values(tmp_path: Path) -> None:
    old = write(tmp_path / "old", {"kv_scale": torch.tensor(K)})
    new = write(tmp_path / "new", pair(K, K))
    assert computed(old, with_dtype(old, "fp8")) == computed(new, with_dtype(new, "fp8"))


@pytest.mark.parametrize("dtype", ["fp8_per_token_head", "int8", "int4_per_token_head", "model"])
def test_other_choices_do_not_take_scales(dtype: str, tmp_path: Path) -> None:
    scaled, plain = write(tmp_path / "scaled", pair(K, V)), write(tmp_path / "plain", {})
    assert computed(scaled, with_dtype(scaled, dtype)) == computed(plain, with_dtype(plain, dtype))


def test_a_checkpoint_without_scales_has_one_for_each_token(tmp_path: Path) -> None:
    path = write(tmp_path, {})
    tokens = computed(path, with_dtype(path, "fp8_per_token_head"))
    assert computed(path, with_dtype(path, "fp8")) == tokens


def test_a_scale_is_rounded_up_to_the_next_number_of_float16(tmp_path: Path) -> None:
    found = kept_scales(loaded_with(write(tmp_path, pair(0.1, 3e-6))))
    assert len(found) == 2
    for scales in found:
        assert scales.dtype == torch.float16
        assert bool((scales[:2].float() >= 0.1).all() and (scales[:2].float() < 0.1001).all())
        assert bool((scales[2:].float() >= 3e-6).all() and (scales[2:].float() < 3.1e-6).all())


def test_each_rank_has_the_scales_of_its_heads(tmp_path: Path) -> None:
    keys, values = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    path = write(tmp_path, {"k_scale": keys, "v_scale": values})
    for rank in range(2):
        for scales in kept_scales(loaded_with(path, rank=rank, ranks=2)):
            assert scales.tolist() == [1.0 + rank, 3.0 + rank]


def loaded_with(path: str, **options: Any) -> DecoderForCausalLM:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "tests.quantized.loaded.load_model_spec", lambda path, **_: with_dtype(path, "fp8")
        )
        return loaded(path, **options)


def kept_scales(model: DecoderForCausalLM) -> list[Tensor]:
    """Return the scales of each layer; a layer may have several paths."""
    found = weights_of(model).items()
    return list({id(one): one for name, one in found if name.endswith("_kv_scales")}.values())


@pytest.mark.parametrize(
    ("scales", "words"),
    [
        (pair(0.0, V), "0.self_attn.k_scale is 0 in the checkpoint, which is no scale"),
        (pair(K, float("nan")), "0.self_attn.v_scale is nan in the checkpoint"),
        (pair(-K, V), "0.self_attn.k_scale is -0.015625 in the checkpoint"),
        (pair(K, float("inf")), "0.self_attn.v_scale is inf .* a scale is from 6e-08 to 65504"),
        ({"k_scale": torch.ones(3), "v_scale": torch.ones(1)}, "k_scale has 3 numbers"),
        ({"k_scale": torch.ones(1)}, "it lacks model.layers.0.self_attn.v_scale"),
    ],
)
def test_what_is_no_scale_is_refused_by_name(
    scales: dict[str, Tensor], words: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineStartError, match=words) as caught:
        loaded_with(write(tmp_path, scales))
    assert str(caught.value).startswith("model: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("method", CONFIGS)
def test_auto_follows_the_files(method: str, tmp_path: Path) -> None:
    path = write(tmp_path, pair(K, V), CONFIGS[method])
    asked, forced, kept = (with_dtype(path, dtype) for dtype in ("auto", "fp8", "model"))
    assert asked == forced
    assert {mixer.kv_format for mixer in attention_of(kept.layers)} == {"model"}
    assert computed(path, asked) == computed(path, forced) != computed(path, kept)
    skipping = with_kv_cache_dtype(load_model_spec(path), "auto", ["0"])
    assert [m.kv_format for m in attention_of(skipping.layers)] == ["model", "fp8"]


def test_auto_follows_modelopts_own_file(tmp_path: Path) -> None:
    path = write(tmp_path, pair(K, V))
    stated = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["*"]}
    state(tmp_path, {"quantization": stated}, "hf_quant_config.json")
    assert computed(path, with_dtype(path, "auto")) == computed(path, with_dtype(path, "fp8"))


@pytest.mark.parametrize("asked", [{}, {"kv_cache_scheme": None}, {"kv_cache_quant_algo": None}])
def test_auto_keeps_the_type_of_other_models(asked: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path, pair(K, V), {**FP8, **asked})
    assert with_dtype(path, "auto") == load_model_spec(path)
    with pytest.raises(ValidationError, match="kv_cache_dtype_skip_layers: has a meaning only"):
        with_kv_cache_dtype(load_model_spec(path), "auto", ["0"])


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"kv_cache_scheme": {**SCHEME, "type": "int"}}, "type in kv_cache_scheme .* is 'int'"),
        ({"kv_cache_scheme": {**SCHEME, "num_bits": 4}}, "num_bits in kv_cache_scheme .* is 4"),
        ({"kv_cache_scheme": "fp8"}, "kv_cache_scheme .* must be an object"),
        ({"kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo .* is 'NVFP4'"),
    ],
)
def test_other_forms_of_keys_and_values_are_refused(
    asked: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = write(tmp_path, {}, {**FP8, **asked})
    with pytest.raises(EngineStartError, match=words):
        load_model_spec(path)
