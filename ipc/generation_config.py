"""What a model's makers say of generating with it: sampling parameters, and what ends an output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from sidestep.ipc.errors import EngineStartError, ValidationError
from sidestep.ipc.hf_config import read_json, token_ids
from sidestep.ipc.sampling_params import SamplingParams

FILE = "generation_config.json"
_NAMES = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
          "repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens"}
"""Fields of the file that set a default -> the sampling parameters that they are."""


class GenerationConfig(msgspec.Struct, frozen=True):
    """The part of a generation_config.json that the engine uses."""

    eos_token_ids: tuple[int, ...] = ()
    sampling: dict[str, int | float] = {}
    """Sampling parameters, by the engine's names, of requests that do not set them."""


def read_generation_config(folder: str, *, required: bool = False,
                           with_sampling: bool = True) -> GenerationConfig:
    """Return what the file in a folder says; nothing if there is no file, unless it is required.
    with_sampling: whether its sampling parameters count.

    Raises EngineStartError, which names the file and what is wrong in it.
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
        raise EngineStartError(f"generation_config: {file}: {error} (generation_config 'none' "
                               "leaves the file's sampling parameters out)") from None
    eos = token_ids(values.get("eos_token_id"), f"eos_token_id in {FILE}")
    return GenerationConfig(eos, sampling)


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    """Those parts of a tokenizer.json that can name a token's id."""

    added_tokens: list[_AddedToken] = []
    model: msgspec.Raw = msgspec.Raw(b"{}")
    """Read only where it must be: it has all tokens."""


class _Model(msgspec.Struct):
    vocab: Any = None


def read_tokenizer_eos(folder: str) -> tuple[int, ...]:
    """Return the id of the tokenizer's own end-of-sequence token, if it names one.

    Files that cannot be read name none here: loading the tokenizer says what is wrong with them.
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
