"""The tokenizer of a Hugging Face folder: text to tokens and back, and chat templates.

It uses the `tokenizers` and `jinja2` libraries directly: transformers would bring torch into the
frontend.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as FastTokenizer

from sidestep.frontend.input.lane import give_memory_back
from sidestep.frontend.input.prompt_limit import PromptLimit
from sidestep.frontend.input.template_files import DEFAULT, TOOL_USE, Message, chat_templates
from sidestep.frontend.input.text_bound import TextBound
from sidestep.frontend.input.token_alphabet import TokenAlphabet
from sidestep.frontend.input.tokenizer_methods import TokenizerMethods
from sidestep.frontend.vllm.vllm_names import takes_vllm_arguments
from sidestep.ipc.common.errors import (
    EngineStartError,
    NoChatTemplateError,
    ValidationError,
)
from sidestep.ipc.params.sampling_params import SamplingParams

if TYPE_CHECKING:
    from sidestep.frontend.input.chat_template import ChatTemplate

LONG_TEXT = 2048
"""Characters from which tokenising would noticeably delay the event loop's other streams.

Tokenising takes up to 1 us a character.
"""
_HUGE_TEXT = 1 << 20
"""Characters from which the library's memory is returned to the system.

The memory is about 150 bytes a character.
"""
_SPECIAL = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_MAX_TEMPLATES = 32
"""Compiled chat templates that are kept: the model's own, and templates that calls bring."""


class Tokenizer(TokenizerMethods):
    """A model's tokenizer; thread-safe.

    Tokenising long texts and decoding release the interpreter lock.
    """

    has_texts = True
    """Whether tokens can be converted to text, and text to tokens."""

    def __init__(self, folder: str) -> None:
        """Read the tokenizer's files.

        Raises EngineStartError, in one line, if the folder's files are missing or cannot be read.
        """
        self.fast = _load(Path(folder))
        # A file may hold the settings of the training, which would cut prompts silently.
        self.fast.no_truncation()
        self.fast.no_padding()
        self.special_ids = frozenset(
            i for i, t in self.fast.get_added_tokens_decoder().items() if t.special
        )
        """Ids that `skip_special_tokens` leaves out of a text."""
        self._added = {i: t.content for i, t in self.fast.get_added_tokens_decoder().items()}
        self._alphabet = TokenAlphabet(self.fast)
        self._token_bytes: dict[int, bytes] = {}
        self.special_token_ids = {
            t.content: i for i, t in self.fast.get_added_tokens_decoder().items() if t.special
        }
        """The same ids by the texts of their tokens."""
        self.bound = TextBound(self.fast)
        """Lower bounds on the number of a text's tokens."""
        config = _read_json(Path(folder) / "tokenizer_config.json")
        self._special_tokens = {
            name: text for name in _SPECIAL if (text := _text(config.get(name))) is not None
        }
        self._templates = chat_templates(Path(folder), config)
        self._compiled: dict[str, ChatTemplate] = {}
        """Compiled templates by their sources."""

    def __repr__(self) -> str:
        return f"Tokenizer({self.vocab_size} tokens, chat_templates={sorted(self._templates)})"

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included."""
        return int(self.fast.get_vocab_size())

    @property
    def chat_template(self) -> str | None:
        """Source of the template that conversations without tools use, if the model has one."""
        return self.template_for(None)

    @chat_template.setter
    def chat_template(self, source: str | None) -> None:
        """Use one template for all conversations, or none."""
        self._templates = {} if source is None else {DEFAULT: source}
        self._compiled = {}

    def template_for(self, tools: object) -> str | None:
        """Return the source of the template for a conversation with `tools` (None: no tools)."""
        return self._templates.get(self._template_name(tools))

    def _template_name(self, tools: object) -> str:
        return TOOL_USE if tools is not None and TOOL_USE in self._templates else DEFAULT

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Raise ValidationError for parameters that this tokenizer cannot serve."""

    @takes_vllm_arguments
    def encode(
        self, text: str, add_special_tokens: bool = True, limit: PromptLimit | None = None
    ) -> list[int]:
        """Return the token ids of a text.

        By default, add the special tokens that the model puts around every text.

        Raises ValidationError for a text with lone surrogates, which no encoding of text can hold.
        Raises PromptTooLongError for a text of more tokens than the limit allows.
        """
        try:
            # For a single text the library releases the interpreter lock only in `encode_batch`. It
            # then notes that it may have used threads, and warns programs that fork later, so short
            # texts take the other way.
            encoding = (
                self.fast.encode(text, add_special_tokens=add_special_tokens)
                if len(text) <= LONG_TEXT
                else self.fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
            )
        except TypeError:
            raise ValidationError(
                "prompt", "is not valid text: it cannot be written as UTF-8"
            ) from None
        try:
            if limit is not None:
                limit.check(len(encoding))  # before the ids become objects
            return list(encoding.ids)
        finally:
            del encoding
            if len(text) > _HUGE_TEXT:
                give_memory_back()

    def encode_pair(self, text: str, other: str) -> list[int]:
        """Return the token ids of two texts as one prompt, with the model's special tokens.

        Raises ValidationError for a text with lone surrogates.
        """
        try:
            return list(self.fast.encode(text, other).ids)
        except TypeError:
            raise ValidationError(
                "prompt", "is not valid text: it cannot be written as UTF-8"
            ) from None

    def decode(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of token ids, or of one."""
        several = [ids] if isinstance(ids, int) else list(ids)
        if len(several) <= LONG_TEXT:
            return str(self.fast.decode(several, skip_special_tokens=skip_special_tokens))
        return str(
            self.fast.decode_batch([several], skip_special_tokens=skip_special_tokens)[0]
        )  # as in `encode`

    def token_bytes(self, token: int) -> bytes:
        """Return the UTF-8 bytes of one token by itself, which may be a part of a character."""
        found = self._token_bytes.get(token)
        if found is None:
            found = self._token_bytes[token] = (
                self._alphabet.bytes_of(self.fast.id_to_token(token) or "")
                if token not in self._added
                else self._added[token].encode()
            )
        return found

    def token_text(self, token: int) -> str:
        """Return one token by itself as text.

        A replacement character stands for bytes that are no character.
        """
        return self.token_bytes(token).decode("utf-8", "replace")

    def prepare_chats(self) -> None:
        """Compile the model's chat templates, so that the first conversation need not wait.

        An error in a template is one of the conversations that use it.
        """
        for source in self._templates.values():
            with suppress(ValidationError):
                self._template(source, None)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt of a conversation as text, with its special tokens.

        chat_template: a template instead of the model's own. The template gets `variables`. Raises
        ValidationError when there is no template or it refuses the messages.
        """
        template = self._template(chat_template, variables.get("tools"))
        return template.render(messages, add_generation_prompt=add_generation_prompt, **variables)

    def template_variables(self, tools: object) -> frozenset[str]:
        """Return the names of the variables that the template for these tools reads.

        Raises ValidationError like `render_chat`.
        """
        return self._template(None, tools).variables

    def _template(self, source: str | None, tools: object) -> ChatTemplate:
        """Return the template `source`.

        Without `source`, return the model's own template for a conversation with these tools.
        """
        if source is None:
            source = self.template_for(tools)
        elif not isinstance(source, str):
            raise ValidationError("chat_template", f"must be text, not {type(source).__name__}")
        if source is None:
            others = ", ".join(sorted(self._templates))
            which = f" of the name {DEFAULT!r}, only {others}" if others else ""
            raise NoChatTemplateError(f"this model has no chat template{which}")
        if (made := self._compiled.get(source)) is None:
            if len(self._compiled) >= _MAX_TEMPLATES:
                self._compiled.clear()
            from sidestep.frontend.input.chat_template import ChatTemplate  # imports jinja2

            made = self._compiled[source] = ChatTemplate(source, self._special_tokens)
        return made


def _load(folder: Path) -> FastTokenizer:
    file = folder / "tokenizer.json"
    if not file.exists():
        raise EngineStartError(
            f"tokenizer: {folder} has no tokenizer.json; make one with transformers: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    try:
        return FastTokenizer.from_file(str(file))
    except Exception as error:  # the library raises no narrower type
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
    """Return the text of a special token of the configuration.

    It is written as a string, or as an object with its text in `content`.
    """
    return token.get("content") if isinstance(token, dict) else token
