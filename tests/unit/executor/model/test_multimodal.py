"""The language models inside models of text and images: read from the same files, for text alone.

Greedy tokens equal those of the whole model in transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma4Config,
    Gemma4UnifiedConfig,
    Gemma4VisionConfig,
    Mistral3Config,
    PixtralVisionConfig,
    PretrainedConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    SiglipVisionConfig,
)

from sidestep.executor.models.model_loading import MULTIMODAL
from sidestep.ipc.common import registry
from sidestep.ipc.model.layer_spec import attention_of
from sidestep.ipc.model.model_size import num_parameters
from sidestep.ipc.model.model_spec import load_model_spec
from tests.e2e.models import FAMILIES, random_prompts, reference_tokens
from tests.unit.executor.steps import Request
from tests.unit.executor.test_model_runner import make_runner, run

pytestmark = pytest.mark.usefixtures("one_thread")


def mistral3(text: str, *, tied: bool = False) -> PretrainedConfig:
    config = FAMILIES[text]()
    config.update({"tie_word_embeddings": tied})
    vision = PixtralVisionConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        patch_size=4,
        image_size=16,
    )
    return Mistral3Config(text_config=config, vision_config=vision, tie_word_embeddings=tied)


def gemma3() -> PretrainedConfig:
    vision = SiglipVisionConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        patch_size=4,
        image_size=16,
    )
    return Gemma3Config(text_config=FAMILIES["gemma3"](), vision_config=vision)


def gemma4() -> PretrainedConfig:
    vision = Gemma4VisionConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        patch_size=4,
        position_embedding_size=16,
    )
    text = FAMILIES["gemma4-token-inputs"]()
    text.update({"use_bidirectional_attention": "vision", "pad_token_id": 0})
    return Gemma4Config(text_config=text.to_dict(), vision_config=vision)


def gemma4_unified() -> PretrainedConfig:
    text = FAMILIES["gemma4-unified"]()
    text.update({"pad_token_id": 0})
    return Gemma4UnifiedConfig(text_config=text.to_dict())


_QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 48,
}


def qwen3_5() -> PretrainedConfig:
    text = FAMILIES["qwen3.5"]().to_dict()
    return Qwen3_5Config(text_config=text, vision_config=_QWEN_VISION, tie_word_embeddings=True)


def qwen3_5_moe() -> PretrainedConfig:
    text = FAMILIES["qwen3.5-moe"]().to_dict()
    return Qwen3_5MoeConfig(text_config=text, vision_config=_QWEN_VISION)


def write(config: PretrainedConfig, folder: Path) -> Any:
    """Write a random model, and return it."""
    torch.manual_seed(5)
    model: Any = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.model.language_model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 1.0 if "embed" in name else 0.25)
        model.lm_head.weight.normal_(0, 1.0)
    model.save_pretrained(folder)
    return model.eval()


def check(model: Any, folder: Path) -> None:
    """Check that the engine's tokens are those of the model."""
    prompts = random_prompts(6, 331, longest=60)
    runner = make_runner(str(folder))
    got = run(runner, [Request(prompt, 6) for prompt in prompts])
    assert got == reference_tokens(model, prompts, [6] * len(prompts))


def test_every_such_architecture_is_tested_here() -> None:
    found = {name for name in registry.MODELS if name.endswith(MULTIMODAL)}
    tested = {"Gemma3", "Gemma4", "Gemma4Unified", "Mistral3", "Qwen3_5", "Qwen3_5Moe"}
    assert found == {f"{name}{MULTIMODAL}" for name in tested}


@pytest.mark.parametrize(
    "config",
    [
        gemma3(),
        gemma4(),
        gemma4_unified(),
        mistral3("ministral3", tied=True),
        mistral3("ministral3"),
        mistral3("mistral-window"),
        qwen3_5(),
        qwen3_5_moe(),
    ],
    ids=[
        "gemma3",
        "gemma4",
        "gemma4-unified",
        "ministral3-tied",
        "ministral3",
        "mistral",
        "qwen3.5",
        "qwen3.5-moe",
    ],
)
def test_text_of_a_multimodal_model_equals_transformers(
    config: PretrainedConfig, tmp_path: Path
) -> None:
    check(write(config, tmp_path), tmp_path)


def test_newer_names_of_the_same_tensors_are_read_too(tmp_path: Path) -> None:
    model = write(mistral3("ministral3"), tmp_path)
    file = tmp_path / "model.safetensors"
    older = load_file(file)
    newer = {name: value.clone() for name, value in model.state_dict().items()}
    assert "language_model.model.norm.weight" in older
    assert "model.language_model.norm.weight" in newer
    save_file(newer, file)
    check(model, tmp_path)


def test_images_parts_do_not_count(tmp_path: Path) -> None:
    model = write(mistral3("ministral3"), tmp_path)
    text = [*model.model.language_model.parameters(), *model.lm_head.parameters()]
    spec = load_model_spec(str(tmp_path))
    assert num_parameters(spec, first=True, last=True) == sum(one.numel() for one in text)


def test_a_field_of_the_language_model_can_be_overridden_in_its_place(tmp_path: Path) -> None:
    write(mistral3("mistral-window"), tmp_path)
    spec = load_model_spec(str(tmp_path), {"text_config": {"sliding_window": 7}})
    assert {mixer.window for mixer in attention_of(spec.layers)} == {7}
