"""A process that writes a tokenizer of another kind as tokenizer.json.

transformers reads the tokenizer, which imports torch and takes seconds. So a process of its own
does it, once for each tokenizer, and ends. All other processes read tokenizer.json alone.

The target folder gets tokenizer.json, tokenizer_config.json and the chat templates; or, if the
tokenizer cannot be converted, the file `problem` with one line.
"""

from __future__ import annotations

import base64
import importlib
import importlib.util
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sidestep.executor.processes.gguf_tokenizer import RefusedError, load_gguf
from sidestep.ipc.model.gguf.header import is_gguf
from sidestep.ipc.processes.process import decode_args

PROBES = ("Hello world", "this is a test of words")
"""Texts that every reading of a SentencePiece model divides as SentencePiece does.

They have no special characters and no spaces at either end, which tokenizers treat differently.
"""
_TEKKEN_ROLES: dict[str, Any] = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "add_bos_token": True,
}
"""Special tokens of every tekken.json, which does not name their roles."""


@dataclass(frozen=True, kw_only=True)
class ConverterArgs:
    """Arguments of the process, sent as JSON."""

    source: str
    """Folder with the tokenizer's files."""
    target: str
    """An empty folder."""


def main(raw: bytes) -> None:
    """Run the process."""
    args = decode_args(raw, ConverterArgs)
    try:
        convert(Path(args.source), Path(args.target))
    except Exception as error:  # transformers raises many types, all meaning the same to the user
        reason = str(error).strip().splitlines()
        text = reason[0] if reason else type(error).__name__
        if not isinstance(error, RefusedError):
            text = f"cannot be read by transformers: {type(error).__name__}: {text}"
        (Path(args.target) / "problem").write_text(text, encoding="utf-8")


def convert(source: Path, target: Path) -> None:
    """Write the tokenizer of one folder into another. Raises an exception with the problem."""
    if is_gguf(source):
        load_gguf(source).save_pretrained(str(target))
        return
    model = _model_file(source)
    _check_packages(model)
    tokenizer = _load(source, model)
    if not getattr(tokenizer, "is_fast", False):
        raise RefusedError(
            f"is read as {type(tokenizer).__name__}, a tokenizer in Python, which has no form as "
            "tokenizer.json"
        )
    if model is not None and not is_tiktoken(model):
        _compare(tokenizer, model)
    tokenizer.save_pretrained(str(target))
    template = source / "chat_template.json"
    if template.exists():
        shutil.copy(template, target)


def is_tiktoken(file: Path) -> bool:
    """Return whether a file is tiktoken's: lines of a token in base 64 and its rank."""
    with file.open("rb") as opened:
        words = opened.readline(1000).split()
    try:
        return len(words) == 2 and words[1].isdigit() and bool(base64.b64decode(words[0], b"+/"))
    except ValueError:
        return False


def _model_file(source: Path) -> Path | None:
    """Return the file of SentencePiece or tiktoken that transformers would read, if any."""
    if (source / "tokenizer.json").exists():
        return None
    names = ("tokenizer.model", "tiktoken.model", "spiece.model", "sentencepiece.bpe.model")
    return next((source / name for name in names if (source / name).exists()), None)


def _check_packages(model: Path | None) -> None:
    """Raise RefusedError if a package that reads the file is missing.

    transformers tries tiktoken after any failure, and would name the wrong package.
    """
    if model is None:
        return
    needed = ("tiktoken",) if is_tiktoken(model) else ("sentencepiece", "google.protobuf")
    for package in needed:
        try:
            missing = importlib.util.find_spec(package) is None
        except ModuleNotFoundError:  # there is no package `google` at all
            missing = True
        if missing:
            raise RefusedError(
                f"has {model.name}, which needs the package {package.removeprefix('google.')}: "
                "pip install 'sidestep[tokenizers]'"
            )


def _load(source: Path, model: Path | None) -> Any:
    from transformers import AutoTokenizer
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    named = get_tokenizer_config(str(source)).get("tokenizer_class")
    if model is not None and not is_tiktoken(model) and named is None:
        return _load_alone(source, model)
    given = _TEKKEN_ROLES if named is None and (source / "tekken.json").exists() else {}
    # transformers' own reader of tekken.json makes a tokenizer that only mistral-common has.
    return AutoTokenizer.from_pretrained(
        str(source), trust_remote_code=False, mistral_format=False, **given
    )


def _load_alone(source: Path, model: Path) -> Any:
    """Return the tokenizer of a SentencePiece model whose class is not named.

    As usual for such models, a text begins with the beginning-of-sequence token if there is one.
    """
    from transformers import PreTrainedTokenizerFast

    proto: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2").ModelProto()
    proto.ParseFromString(model.read_bytes())
    return PreTrainedTokenizerFast.from_pretrained(
        str(source), add_bos_token=proto.trainer_spec.bos_id >= 0
    )


def _compare(tokenizer: Any, model: Path) -> None:
    """Raise RefusedError if transformers divides plain words in another way than SentencePiece.

    It does so with a class that is not the model's.
    """
    from sentencepiece import SentencePieceProcessor

    reader = SentencePieceProcessor(model_file=str(model))
    for text in PROBES:
        if tokenizer.encode(text, add_special_tokens=False) != reader.encode(text):
            raise RefusedError(
                f"has {model.name}, which transformers reads as {type(tokenizer).__name__} with "
                "other tokens than SentencePiece; name the right tokenizer_class in "
                "tokenizer_config.json"
            )
