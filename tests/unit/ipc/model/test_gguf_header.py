"""Files in GGUF that cannot be served are refused in one line that names the reason."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.model.model_spec import load_model_spec, resolve_model_path

LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 32,
    "llama.attention.head_count": 2,
    "tokenizer.ggml.tokens": ["a", "b", "c", "d"],
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.eot_token_id": 3,
}
F32, Q8_0, IQ1_S = 0, 8, 19
TENSORS = {"token_embd.weight": ((4, 32), F32), "blk.0.attn_q.weight": ((32, 32), Q8_0)}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def field(value: Any) -> bytes:
    if isinstance(value, list):
        inner = [field(one) for one in value]
        kind = inner[0][:4]
        return (
            struct.pack("<I", 9)
            + kind
            + struct.pack("<Q", len(inner))
            + b"".join(one[4:] for one in inner)
        )
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    return struct.pack("<II", 4, value)


def write(
    file: Path,
    changes: Mapping[str, Any] | None = None,
    tensors: Mapping[str, tuple[tuple[int, ...], int]] = TENSORS,
    *,
    version: int = 3,
) -> Path:
    """Write a header, with enough zeros behind it."""
    values = {name: one for name, one in {**LLAMA, **(changes or {})}.items() if one is not None}
    data = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(values))
    data += b"".join(text(name) + field(value) for name, value in values.items())
    for index, (name, (shape, kind)) in enumerate(tensors.items()):
        data += text(name) + struct.pack("<I", len(shape))
        data += struct.pack(f"<{len(shape)}Q", *reversed(shape))
        data += struct.pack("<IQ", kind, index * 8192)
    file.write_bytes(data + bytes(1 << 15))
    return file


def test_metadata_become_a_specification(tmp_path: Path) -> None:
    spec = load_model_spec(str(write(tmp_path / "model.gguf")))
    assert spec.architecture == "LlamaForCausalLM" and spec.vocab_size == 4
    assert spec.eos_token_ids == (2, 3) and spec.tie_word_embeddings
    assert spec.quantization is not None and spec.quantization.method == "gguf"


def test_a_plain_file_may_be_quantized_while_it_is_loaded(tmp_path: Path) -> None:
    plain = {name: (shape, F32) for name, (shape, _) in TENSORS.items()}
    file = str(write(tmp_path / "model.gguf", tensors=plain))
    assert load_model_spec(file).quantization is None
    spec = load_model_spec(file, quantization="int8")
    assert spec.quantization is not None and spec.quantization.online


@pytest.mark.parametrize(
    ("changes", "tensors", "problem"),
    [
        ({"general.architecture": "mamba"}, TENSORS, "architecture 'mamba' .* are gemma2, gemma3"),
        ({}, {"x": ((4, 256), IQ1_S)}, "x in .* has the type IQ1_S, .* supported are F32, F16, Q4"),
        ({}, {}, "lacks token_embd.weight"),
        ({}, {"x": ((4, 48), Q8_0)}, "x has rows of 48, which are no whole blocks"),
        ({}, {"x": ((4096, 4096), F32)}, "ends before the end of x"),
        ({"llama.expert_count": 8}, TENSORS, "'llama' with experts, .* qwen2moe and qwen3moe"),
        ({"llama.rope.scaling.type": "mrope"}, TENSORS, "scaling.type .* 'mrope', .* linear, yarn"),
        ({"llama.attention.head_count": [2, 4]}, TENSORS, "head_count .* one value for all layers"),
        ({"llama.block_count": None}, TENSORS, "GGUF metadata .* lacks 'num_hidden_layers'"),
    ],
)
def test_what_is_not_supported_is_named(
    changes: dict[str, Any],
    tensors: dict[str, tuple[tuple[int, ...], int]],
    problem: str,
    tmp_path: Path,
) -> None:
    file = write(tmp_path / "model.gguf", changes, tensors)
    with pytest.raises(EngineStartError, match=problem) as caught:
        load_model_spec(str(file))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"GGUF", b"zip!" + bytes(100), b"GGUF\0\0\0\3" + b"x" * 99]
)
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(EngineStartError, match="cannot be read as GGUF: "):
        load_model_spec(str(file))


def test_another_quantization_does_not_fit(tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf")
    with pytest.raises(EngineStartError, match="'awq' does not fit the model"):
        load_model_spec(str(file), quantization="awq")


def test_a_folder_stands_for_its_only_file(tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf")
    assert resolve_model_path(str(tmp_path)) == resolve_model_path(str(file)) == str(file)
    write(tmp_path / "other.gguf")
    with pytest.raises(EngineStartError, match=r"several GGUF models \(model.gguf, other.gguf\)"):
        resolve_model_path(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model_path(str(tmp_path)) == str(tmp_path)


def test_any_file_of_a_split_model_stands_for_all(tmp_path: Path) -> None:
    first, second = (tmp_path / f"model-{i:05}-of-00002.gguf" for i in (1, 2))
    write(second, tensors={"blk.0.attn_k.weight": ((32, 32), Q8_0)})
    with pytest.raises(EngineStartError, match="lacks model-00001-of-00002.gguf"):
        resolve_model_path(str(second))
    write(first)
    assert resolve_model_path(str(second)) == resolve_model_path(str(tmp_path)) == str(first)
    assert load_model_spec(str(first)).vocab_size == 4


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match="there is no file .*none.gguf"):
        resolve_model_path(str(tmp_path / "none.gguf"))
