"""The bundled model is as its card describes it: small, real, and complete."""

import json
import struct
from math import prod
from pathlib import Path

import pytest

from sidestep import DEFAULT_MODEL
from sidestep.frontend.input.tokenizer import Tokenizer

FOLDER = Path(DEFAULT_MODEL)


def test_it_is_at_most_16_mb() -> None:
    assert sum(f.stat().st_size for f in FOLDER.iterdir()) <= 16_000_000


def test_it_is_a_llama_of_3_to_8_million_parameters_in_bfloat16() -> None:
    with (FOLDER / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    tensors = [t for name, t in header.items() if name != "__metadata__"]
    assert 3e6 <= sum(prod(t["shape"]) for t in tensors) <= 8e6
    assert {t["dtype"] for t in tensors} == {"BF16"}
    assert json.loads((FOLDER / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize(
    "text",
    ["def f(x):\n    return x\n", "naïve 🦆 日本", "\t tabs\r\n", "<|im_start|>x<|im_end|>"],
)
def test_its_tokenizer_gives_back_any_text(text: str) -> None:
    tokenizer = Tokenizer(DEFAULT_MODEL)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_its_chat_template_opens_the_assistants_turn() -> None:
    text = Tokenizer(DEFAULT_MODEL).render_chat([{"role": "user", "content": "Hello!"}])
    assert text == "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"


def test_its_card_says_how_it_was_trained_and_how_well() -> None:
    card = (FOLDER / "README.md").read_text()
    for words in (
        "scripts/train_tiny_python.py",
        "seed",
        "steps",
        "validation loss",
        "Software Foundation License",
        "of 64 samples",
    ):
        assert words in card, words
