"""A model that is evaluated: its options, configuration and tokenizer, before its engine starts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from sidestep.frontend.api.startup import load_tokenizer
from sidestep.frontend.input.tokenizer import Tokenizer
from sidestep.frontend.options.engine_args import EngineArgs
from sidestep.frontend.options.eval_options import EvalArgs
from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.common.logs import LogConfig
from sidestep.ipc.config import EngineConfig

MODEL, AGAINST = "model", "against"
"""Roles: the model that is measured, and the reference."""
_SMALL_FILES = (".json", ".jinja", ".txt", ".model")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")


@dataclass(frozen=True)
class Subject:
    """One of the models of an evaluation."""

    role: str
    arguments: EngineArgs
    config: EngineConfig
    tokenizer: Tokenizer
    chats: bool
    """Whether built-in prompts are chats."""

    @classmethod
    def load(cls, role: str, arguments: EngineArgs, args: EvalArgs) -> Self:
        """Read a model's files; raises ValidationError for one that cannot be evaluated."""
        for name in ("max_num_queued_reqs", "max_num_queued_tokens"):
            if getattr(arguments, name) is not None:
                raise ValidationError(name, "would refuse prompts of the evaluation")
        if arguments.skip_tokenizer_init:
            raise ValidationError("skip_tokenizer_init", "cannot go with eval, which reads texts")
        if arguments.device == "fake" and args.measures_text:
            raise ValidationError("device", "'fake' has no log-probabilities of prompts")
        config = arguments.create_engine_config()
        if config.spec.pooling is not None:
            raise ValidationError(role, f"{arguments.model} makes vectors and no text")
        tokenizer = load_tokenizer(config)
        has_template = tokenizer.chat_template is not None
        if args.prompt_form == "chat" and not has_template:
            raise ValidationError("prompt_form", f"{arguments.model} has no chat template")
        return cls(role, arguments, config, tokenizer, has_template and args.prompt_form != "text")

    def text_ids(self, text: str) -> list[int]:
        """Return the token ids of a text to continue, with the model's special tokens."""
        return self.tokenizer.encode(text)

    def chat_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the token ids of a conversation, up to the beginning of the answer."""
        return self.tokenizer.encode(self.tokenizer.render_chat(messages), add_special_tokens=False)

    def identity(self) -> dict[str, Any]:
        """Return what its figures depend on: the model, its files and the options of the engine."""
        given = asdict(self.arguments)
        passed_over = {"model", *(field.name for field in fields(LogConfig))}
        return {
            "model": self.arguments.model,
            "options": {
                field.name: given[field.name]
                for field in fields(EngineArgs)
                if field.name not in passed_over and given[field.name] != field.default
            },
            "files": _digest_of_files(Path(self.config.spec.path)),
        }


def reference_arguments(arguments: EngineArgs, args: EvalArgs) -> EngineArgs:
    """Return the engine's options of the reference. Raises ValidationError for an unknown one."""
    changes = {} if args.against_options is None else dict(args.against_options)
    if "model" in changes:
        raise ValidationError("against_options", "holds model, which --against names")
    defaults = {field.name: field.default for field in fields(EngineArgs)}
    try:
        return arguments.replace(
            model=args.against,
            **{n: defaults.get(n) if value is None else value for n, value in changes.items()},
        )
    except ValidationError as error:
        if error.field in changes:
            raise ValidationError("against_options", str(error)) from None
        raise


def _digest_of_files(folder: Path) -> str:
    """Return a digest of a model's files.

    It reads small files, and of weights only names, sizes and times: they have gigabytes.
    """
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.suffix in _SMALL_FILES:
            digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
        elif file.suffix in _WEIGHTS:
            found = file.stat()
            digest.update(f"{file.name}\0{found.st_size}\0{found.st_mtime_ns}\0".encode())
    return digest.hexdigest()
