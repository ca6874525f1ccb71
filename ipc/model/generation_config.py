"""Reader of generation_config.json.

A model's makers set default sampling parameters in it, and the tokens that end an output.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from sidestep.ipc.common.errors import EngineStartError, ValidationError
from sidestep.ipc.model.hf_config import read_json, token_ids
from sidestep.ipc.params.sampling_params import SamplingParams

FILE = "generation_config.json"
_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Fields of the file that set a default -> the engine's sampling parameters."""


class GenerationConfig(msgspec.Struct, frozen=True):
    """The part of a generation_config.json that the engine uses."""

    eos_token_ids: tuple[int, ...] = ()
    sampling: dict[str, int | float] = {}
    """Default sampling parameters, by the engine's names."""


def read_generation_config(
    folder: str, *, required: bool = False, with_sampling: bool = True
) -> GenerationConfig:
    """Return the settings of the file in a folder.

    They are empty if there is no file, unless it is required. with_sampling: whether to read its
    sampling parameters. Raises EngineStartError, which names the file and the wrong value.
    """
    file = Path(folder) / FILE
    values = read_json(file)
    if values is None and required:
        raise EngineStartError(f"generation_config: {folder} has no {FILE}")
    values = values or {}
    names = _NAMES if with_sampling else {}
    sampling = {ours: values[name] for name, ours in names.items() if values.get(name) is not None}
    try:
        SamplingParams(**sampling)
    except ValidationError as error:
        raise EngineStartError(
            f"generation_config: {file}: {error} (generation_config 'none' "
            "leaves the file's sampling parameters out)"
        ) from None
    eos = token_ids(values.get("eos_token_id"), f"eos_token_id in {FILE}")
    return GenerationConfig(eos, sampling)


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    """The parts of a tokenizer.json that can name a token's id."""

    added_tokens: list[_AddedToken] = []
    model: msgspec.Raw = msgspec.Raw(b"{}")
    """All tokens; read only where the other parts do not name the id."""


class _Model(msgspec.Struct):
    vocab: Any = None


def read_tokenizer_eos(folder: str) -> tuple[int, ...]:
    """Return the id of the tokenizer's own end-of-sequence token, if it names one.

    For files that cannot be read, return an empty tuple: loading the tokenizer reports their
    errors.
    """
    try:
        config = read_json(Path(folder) / "tokenizer_config.json") or {}
        content = (Path(folder) / "tokenizer.json").read_bytes()
        file = msgspec.json.decode(content, type=_TokenizerFile)
        eos = config.get("eos_token")
        text = eos.get("content") if isinstance(eos, dict) else eos
        return _ids_of(text, file) if isinstance(text, str) else ()
    except (EngineStartError, OSError, msgspec.DecodeError):
        return ()


def _ids_of(text: str, file: _TokenizerFile) -> tuple[int, ...]:
    for token in file.added_tokens:
        if token.content == text:
            return (token.id,)
    vocab = msgspec.json.decode(file.model, type=_Model).vocab
    found = vocab.get(text) if isinstance(vocab, dict) else None
    return (found,) if isinstance(found, int) else ()
