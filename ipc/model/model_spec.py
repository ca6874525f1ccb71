"""The specification of a model: its Hugging Face config.json in one checked, typed structure.

It is read without torch, so that the frontend refuses what cannot run before any process starts. A
value that would change the model's arithmetic and that the engine does not implement is refused by
name: never loaded and silently wrong.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sidestep.ipc.common import registry
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.common.options import require
from sidestep.ipc.model.generation_config import GenerationConfig, read_generation_config
from sidestep.ipc.model.gguf.config_values import config_values
from sidestep.ipc.model.gguf.header import files_of, gguf_in, is_gguf, read_header
from sidestep.ipc.model.hf_config import HfConfig, read_json
from sidestep.ipc.model.layer_size import Divided
from sidestep.ipc.model.layer_spec import LayerSpec, NormSpec, TokenInputSpec
from sidestep.ipc.model.pooling_spec import PoolingSpec, read_pooling
from sidestep.ipc.model.quantization.online import with_head
from sidestep.ipc.model.quantization.weight_scheme import QuantizationSpec
from sidestep.ipc.model.read_quantization import read_quantization


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer. Sizes are of the whole model, before tensor parallelism.

    A family's reader (ipc/model/families) makes it; `load_model_spec` adds the tokens that end an
    output.
    """

    path: str
    architecture: str
    dtype: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    """The layers' specifications, the first layer first."""
    max_position_embeddings: int
    norm: NormSpec
    tie_word_embeddings: bool
    embedding_scale: float = 1.0
    """Factor on the embedding of each token, in the run's type."""
    logits_scale: float = 1.0
    """Factor on the logits."""
    logits_softcap: float | None = None
    """Bound c of the logits: each logit x becomes c tanh(x / c)."""
    unused_layers: int = 0
    """Layers of the checkpoint behind these, which are not computed."""
    unused_weights: tuple[str, ...] = ()
    """Beginnings of the names of further weights in the checkpoint that are not used."""
    eos_token_ids: tuple[int, ...] = ()
    """Ids of the tokens that end an output."""
    quantization: QuantizationSpec | None = None
    """How matrices are quantized; None if they are not. A family may read it by itself."""
    pooling: PoolingSpec | None = None
    """The vectors that the model makes; None if it generates text."""
    extra: dict[str, Any] = {}
    """Further values for a family from another package, of types that JSON has."""

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.layers)

    @property
    def token_input(self) -> TokenInputSpec | None:
        """The vectors of their own that layers take of tokens, if they take any."""
        return self.layers[0].token_input

    @property
    def divided(self) -> tuple[Divided, ...]:
        """Numbers that tensor-parallel ranks share out, each once."""
        return tuple(dict.fromkeys(one for layer in self.layers for one in layer.divided))


TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt")
"""Patterns of a tokenizer's files, and of the small files beside them."""
MODEL_FILES = (*TOKENIZER_FILES, "*.safetensors")
"""Patterns of all files that a model needs."""
_OTHER_WEIGHTS = "pytorch_model*.bin"
"""Files of weights that are fetched where there are no safetensors."""


def resolve_model_path(
    model: str, revision: str | None = None, files: Sequence[str] = MODEL_FILES
) -> str:
    """Return the local folder for a folder's path or a hub name, or the path of a GGUF file.

    A folder that has a GGUF file and no other model stands for the file.

    A hub name's files that match `files` are fetched, where a hub is reachable. If they include
    weights and the hub has no safetensors, the weights in pytorch_model.bin are fetched. Raises
    EngineStartError.
    """
    if os.path.isdir(model):
        folder = Path(os.path.abspath(model))
        wants_model = tuple(files) != TOKENIZER_FILES
        return str((gguf_in(folder) if wants_model else None) or folder)
    if is_gguf(model):
        if not os.path.isfile(model):
            raise EngineStartError(f"model: there is no file {model}")
        return str(files_of(Path(os.path.abspath(model)))[0])
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise EngineStartError(
            f"model: {model!r} is not a folder, nor a hub name of the form owner/name"
        )
    from huggingface_hub import snapshot_download

    try:
        path = snapshot_download(model, revision=revision, allow_patterns=list(files))
        if "*.safetensors" in files and not any(Path(path).glob("*.safetensors")):
            # Files that are there are not fetched again.
            path = snapshot_download(
                model, revision=revision, allow_patterns=[*files, _OTHER_WEIGHTS]
            )
        return str(path)
    except Exception as error:  # the hub client raises many types, all meaning the same to the user
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise EngineStartError(
            f"model: {model!r} is not a folder and could not be fetched from a hub: {reason}"
        ) from None


def load_model_spec(
    path: str,
    overrides: Mapping[str, Any] | None = None,
    generation: GenerationConfig | None = None,
    more_eos: Sequence[int] = (),
    *,
    runner: str = "auto",
    pooler: Mapping[str, Any] | None = None,
    quantization: str | None = None,
    head_quantization: str = "auto",
) -> ModelSpec:
    """Return the spec of the model whose config.json is in a folder.

    overrides: values that replace the file's fields. generation: replaces the folder's own
    generation_config.json. more_eos: tokens that end an output beside those of the files. runner,
    pooler: see read_pooling. quantization: see read_quantization. head_quantization: see with_head.
    Raises EngineStartError with one line on the problem; ValidationError for a wrong override.
    """
    config = read_config(path, overrides)
    spec: ModelSpec = _reader(config.architecture)(config)
    generation = generation or read_generation_config(path, with_sampling=False)
    eos = [*_stated_eos(config, generation), *more_eos]
    pooling = read_pooling(config, runner, pooler)
    quantized = spec.quantization or read_quantization(config, quantization)
    rounds_head = head_quantization not in ("auto", "none")
    require(not rounds_head or pooling is None, "head_quantization", "a model that pools has none")
    quantized = with_head(quantized, head_quantization)
    config.check_overrides()
    # A tokenizer may have tokens that the model cannot generate; masks have no bit for them.
    eos = [token for token in dict.fromkeys(eos) if token < spec.vocab_size]
    return msgspec.structs.replace(
        spec, eos_token_ids=tuple(eos), pooling=pooling, quantization=quantized
    )


def read_config(path: str, overrides: Mapping[str, Any] | None = None) -> HfConfig:
    """Return the config.json of a folder, or what a GGUF file has in its place.

    Raises EngineStartError.
    """
    if is_gguf(path):
        return HfConfig(path, config_values(read_header(path)), overrides, "the GGUF metadata")
    values = read_json(Path(path) / "config.json")
    if values is None:
        raise EngineStartError(f"model: {path} has no config.json")
    return HfConfig(path, values, overrides)


def _stated_eos(config: HfConfig, generation: GenerationConfig) -> tuple[int, ...]:
    """Return the end-of-sequence tokens that the user or the model's files state.

    The user's override counts, else generation_config.json, else config.json.
    """
    of_config = config.token_ids("eos_token_id")
    is_override = "eos_token_id" in config.overridden
    return of_config if is_override else generation.eos_token_ids or of_config


def _reader(architecture: str) -> Any:
    """Return the function that reads the family's configs.

    Raises EngineStartError if another package's function is missing.
    """
    target = registry.model_spec_reader(architecture)
    try:
        return registry.load(target)
    except (ImportError, AttributeError) as error:
        raise EngineStartError(
            f"model: {target!r}, which reads the config of {architecture}, cannot "
            f"be imported: {error}"
        ) from None


def difference(one: Any, other: Any, name: str) -> str:
    """Return where a part of one model's spec first differs from another's, and both values.

    name: the part's own. The values are those of the smallest part that differs.
    """
    inner: Iterator[tuple[Any, Any, str]] = iter(())
    if isinstance(one, msgspec.Struct) and type(one) is type(other):
        fields = one.__struct_fields__
        inner = ((getattr(one, f), getattr(other, f), f"{name}.{f}") for f in fields)
    elif isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        inner = ((a, b, f"{name}.{i}") for i, (a, b) in pairs)
    elif isinstance(one, tuple) and isinstance(other, tuple):
        return f"{len(one)} {name}, not {len(other)}"
    for parts in inner:
        if parts[0] != parts[1]:
            return difference(*parts)
    return f"{name} {one!r}, not {other!r}"
