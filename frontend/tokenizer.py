"""Text to tokens and back, and chat templates, from a Hugging Face folder's own files.

Uses the `tokenizers` and `jinja2` libraries directly: transformers would bring torch into the frontend.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
from tokenizers import Tokenizer as FastTokenizer

from sidestep.ipc.errors import EngineStartError, ValidationError

Message = Mapping[str, Any]
"""A chat message: role, content, and whatever else the template reads."""


class Tokenizer:
    """A model's tokenizer. Thread-safe: tokenising and decoding release the interpreter lock."""

    def __init__(self, folder: str) -> None:
        file = Path(folder) / "tokenizer.json"
        if not file.exists():
            raise EngineStartError(
                f"tokenizer: {folder} has no tokenizer.json; make one with transformers: "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)")
        self.fast = FastTokenizer.from_file(str(file))
        self._config = _read(Path(folder) / "tokenizer_config.json")
        self.chat_template = _chat_template(Path(folder), self._config)
        self.eos_token = _text(self._config.get("eos_token"))
        self.bos_token = _text(self._config.get("bos_token"))
        self._compiled: jinja2.Template | None = None

    def __repr__(self) -> str:
        return f"Tokenizer({self.vocab_size} tokens, chat_template={self.chat_template is not None})"

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included."""
        return int(self.fast.get_vocab_size())

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-sequence token."""
        return self.fast.token_to_id(self.eos_token) if self.eos_token else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with those that the model puts around every text unless told not to."""
        return list(self.fast.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return str(self.fast.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def apply_chat_template(self, messages: Sequence[Message], *, add_generation_prompt: bool = True,
                            tokenize: bool = False, **variables: Any) -> str | list[int]:
        """The prompt of a conversation, as text or as token ids. `variables` reach the template.

        Raises ValidationError when the model has no template or the template refuses the messages.
        """
        if self.chat_template is None:
            raise ValidationError("prompt", "is a chat, but this model has no chat template")
        if self._compiled is None:
            self._compiled = _environment().from_string(self.chat_template)
        try:
            text = self._compiled.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt,
                **{"eos_token": self.eos_token or "", "bos_token": self.bos_token or "", **variables})
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            raise ValidationError("messages", f"the chat template refuses them: {error}") from None
        # The template writes the special tokens itself.
        return self.encode(text, add_special_tokens=False) if tokenize else text


def _read(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    value = json.loads(file.read_text())
    return value if isinstance(value, dict) else {}


def _text(token: Any) -> str | None:
    """A special token is written as a string, or as an object with its text in `content`."""
    return token.get("content") if isinstance(token, dict) else token


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    separate = folder / "chat_template.jinja"
    if separate.exists():
        return separate.read_text()
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones
        return next((str(t["template"]) for t in template if t.get("name") == "default"), None)
    return template


def _environment() -> jinja2.Environment:
    """What chat templates on the hub are written for."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
        return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)

    def strftime_now(pattern: str) -> str:
        return datetime.datetime.now().strftime(pattern)

    environment.filters["tojson"] = to_json
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment
