"""Text to tokens and back, and chat templates, from a Hugging Face folder's own files.

Uses the `tokenizers` and `jinja2` libraries directly: transformers would bring torch into the frontend.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from sidestep.frontend.chat_template import ChatTemplate, Message
from sidestep.frontend.token_alphabet import TokenAlphabet
from sidestep.ipc.errors import EngineStartError, ValidationError

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's tokenizer. Thread-safe: tokenising and decoding release the interpreter lock."""

    def __init__(self, folder: str) -> None:
        """Raises EngineStartError, in one line, if the folder's files are missing or cannot be read."""
        self.fast = _load(Path(folder))
        # A file may carry the settings of its training, which would cut prompts without a word.
        self.fast.no_truncation()
        self.fast.no_padding()
        self.special_ids = frozenset(i for i, t in self.fast.get_added_tokens_decoder().items() if t.special)
        """Ids that `skip_special_tokens` leaves out of a text."""
        self._added = {i: t.content for i, t in self.fast.get_added_tokens_decoder().items()}
        self._alphabet = TokenAlphabet(self.fast)
        self._token_bytes: dict[int, bytes] = {}
        self.special_token_ids = {t.content: i for i, t in self.fast.get_added_tokens_decoder().items() if t.special}
        """The same, by their text."""
        config = _read_json(Path(folder) / "tokenizer_config.json")
        self._special_tokens = {name: text for name in _SPECIAL if (text := _text(config.get(name))) is not None}
        self.chat_template = _chat_template(Path(folder), config)
        """The template's source, if the model has one."""
        self._compiled: ChatTemplate | None = None

    def __repr__(self) -> str:
        return f"Tokenizer({self.vocab_size} tokens, chat_template={self.chat_template is not None})"

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included."""
        return int(self.fast.get_vocab_size())

    @property
    def eos_token(self) -> str | None:
        """Text of the end-of-sequence token."""
        return self._special_tokens.get("eos_token")

    @property
    def bos_token(self) -> str | None:
        """Text of the beginning-of-sequence token."""
        return self._special_tokens.get("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-sequence token."""
        return self.fast.token_to_id(self.eos_token) if self.eos_token else None

    @property
    def bos_token_id(self) -> int | None:
        """Id of the beginning-of-sequence token."""
        return self.fast.token_to_id(self.bos_token) if self.bos_token else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with those that the model puts around every text unless told not to.

        Raises ValidationError for a text with lone surrogates, which no encoding of text can hold.
        """
        try:
            return list(self.fast.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError:
            raise ValidationError("prompt", "is not valid text: it cannot be written as UTF-8") from None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return str(self.fast.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes of one token by itself, which may be a part of a character."""
        found = self._token_bytes.get(token)
        if found is None:
            found = self._token_bytes[token] = self._alphabet.bytes_of(self.fast.id_to_token(token) or "") \
                if token not in self._added else self._added[token].encode()
        return found

    def token_text(self, token: int) -> str:
        """One token by itself as text; a replacement character stands for bytes that are none."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def apply_chat_template(self, messages: Sequence[Message], *, add_generation_prompt: bool = True,
                            tokenize: bool = False, **variables: Any) -> str | list[int]:
        """The prompt of a conversation, as text or as token ids. `variables` reach the template.

        Raises ValidationError when the model has no template or the template refuses the messages.
        """
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, **variables)
        # The template writes the special tokens itself.
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The prompt of a conversation as text; special tokens are in it already."""
        if self.chat_template is None:
            raise ValidationError("messages", "this model has no chat template; give the prompt as text")
        if self._compiled is None:
            self._compiled = ChatTemplate(self.chat_template, self._special_tokens)
        return self._compiled.render(messages, add_generation_prompt=add_generation_prompt, **variables)


def _load(folder: Path) -> FastTokenizer:
    file = folder / "tokenizer.json"
    if not file.exists():
        raise EngineStartError(
            f"tokenizer: {folder} has no tokenizer.json; make one with transformers: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)")
    try:
        return FastTokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more special
        raise EngineStartError(f"tokenizer: {file} cannot be read: {error}") from None


def _read_json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise EngineStartError(f"tokenizer: {file} is not valid JSON ({error})") from None
    return value if isinstance(value, dict) else {}


def _text(token: Any) -> str | None:
    """A special token is written as a string, or as an object with its text in `content`."""
    return token.get("content") if isinstance(token, dict) else token


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    separate = folder / "chat_template.jinja"
    if separate.exists():
        return separate.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones
        return next((str(t["template"]) for t in template if t.get("name") == "default"), None)
    return template
