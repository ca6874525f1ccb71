"""The folder that a tokenizer is read from: one with tokenizer.json, whatever kind the model has.

Tokenizers of other kinds are converted once, by a process of its own
(executor/processes/tokenizer_converter.py), and kept in the user's cache folder. The name there is
a digest of the tokenizer's files and of the packages that read them, so nothing is ever out of
date.

Order: the new files are written beside their place, and moved there in one step. So processes that
convert at the same time do not see each other's halves, and the last one finds the place taken.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from importlib import metadata
from pathlib import Path

from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.common.registry import TOKENIZER_CONVERTER
from sidestep.ipc.config import cache_folder_of_environment
from sidestep.ipc.model.gguf.header import is_gguf, read_header
from sidestep.ipc.processes.process import spawn

logger = logging.getLogger(__name__)

_KINDS = (
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
)
"""Files of tokenizers of other kinds."""
_READ_TOO = ("*.json", "*.jinja", "*.txt", "additional_chat_templates/*")
"""Further files that decide on a tokenizer and its chat templates."""
_NOT_READ = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_PACKAGES = ("transformers", "tokenizers", "sentencepiece", "tiktoken")
_CONVERT_S = 600.0
"""Seconds that a conversion may take; the import of transformers takes most of them."""
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
"""Environment of the converter, which reads a folder and needs no hub."""


def tokenizer_folder(folder: str, mode: str) -> str:
    """Return the folder with the tokenizer.json of a model's folder, or of a GGUF file.

    mode: 'auto' converts only if there is no tokenizer.json; 'hf' always takes the tokenizer as
    transformers reads it. A folder without any tokenizer is returned as it is. Raises
    EngineStartError.
    """
    source = Path(folder)
    if is_gguf(source):
        _check_transformers(source)
        return str(_converted(source))
    if mode == "auto" and (source / "tokenizer.json").exists():
        return folder
    if not any(next(source.glob(kind), None) for kind in (*_KINDS, "tokenizer.json")):
        return folder
    _refuse_own_code(source)
    _check_transformers(source)
    return str(_converted(source))


def _check_transformers(source: Path) -> None:
    """Raise EngineStartError if the package that reads the tokenizer is missing."""
    if importlib.util.find_spec("transformers") is None:
        raise EngineStartError(
            f"tokenizer: {source} is read by transformers, which is not installed: "
            "pip install 'sidestep[tokenizers]'"
        )


def _refuse_own_code(source: Path) -> None:
    """Raise EngineStartError if the tokenizer is code that comes with the model."""
    try:
        config = json.loads((source / "tokenizer_config.json").read_bytes())
        own = config["auto_map"]
    except (OSError, ValueError, LookupError, TypeError):
        return
    if not isinstance(own, dict) or "AutoTokenizer" in own:
        raise EngineStartError(
            f"tokenizer: {source} has code of its own for its tokenizer (auto_map), which is never "
            "run here; give the folder of a tokenizer.json as the option tokenizer"
        )


def _converted(source: Path) -> Path:
    """Return the folder of the converted tokenizer, which is made if it is not there yet."""
    place = _cache() / _digest(source)
    if (place / "tokenizer.json").exists():
        return place
    logger.info("the tokenizer of %s is converted, which takes some seconds once", source)
    new = Path(tempfile.mkdtemp(prefix="new-", dir=place.parent))
    try:
        child = spawn(
            "sidestep tokenizer converter",
            TOKENIZER_CONVERTER,
            {"source": str(source), "target": str(new)},
            env=_ENVIRONMENT,
            remove=[str(new)],
        )
        try:
            child.wait(_CONVERT_S)
            cause = child.death_cause()
        finally:
            child.stop()
        if (new / "problem").exists():
            problem = (new / "problem").read_text(encoding="utf-8")
            raise EngineStartError(f"tokenizer: {source} {problem}")
        if not (new / "tokenizer.json").exists():
            raise EngineStartError(f"tokenizer: {source} cannot be converted: {cause}")
        try:
            new.rename(place)
        except OSError:  # another process was faster
            if not (place / "tokenizer.json").exists():
                raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return place


def _cache() -> Path:
    folder = cache_folder_of_environment()
    if folder is None:
        raise EngineStartError(
            "tokenizer: there is no folder for the converted tokenizer; set HOME or XDG_CACHE_HOME"
        )
    folder = folder / "tokenizers"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EngineStartError(
            f"tokenizer: {folder} is the place of converted tokenizers and cannot be made: {error}"
        ) from None
    if not os.access(folder, os.W_OK):
        raise EngineStartError(
            f"tokenizer: {folder} is the place of converted tokenizers and cannot be written to; "
            "set XDG_CACHE_HOME"
        )
    return folder


def _digest(source: Path) -> str:
    """Return a digest of all that a converted tokenizer depends on."""
    found = hashlib.sha256()
    if is_gguf(source):
        with source.open("rb") as opened:
            found.update(opened.read(read_header(source).num_bytes))
    files = {
        file
        for pattern in (*_KINDS, *_READ_TOO)
        for file in source.glob(pattern)
        if file.is_file() and file.name not in _NOT_READ
    }
    for file in sorted(files):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        found.update(f"{file.relative_to(source)} {content}\n".encode())
    for package in _PACKAGES:
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            version = "none"
        found.update(f"{package} {version}\n".encode())
    return found.hexdigest()[:32]
