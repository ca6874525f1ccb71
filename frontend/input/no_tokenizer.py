"""The tokenizer of an engine with skip_tokenizer_init.

It knows the number of tokens, and no texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from sidestep.frontend.input.prompt_limit import PromptLimit
from sidestep.frontend.input.template_files import Message
from sidestep.frontend.input.tokenizer import Tokenizer
from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.params.sampling_params import SamplingParams

_NEED_TEXT = ("stop", "bad_words", "structured_outputs")
"""Sampling parameters that need the texts of tokens."""


class NoTokenizer(Tokenizer):
    """A tokenizer that knows only the number of tokens.

    Methods that need texts of tokens raise ValidationError.
    """

    has_texts = False

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.special_ids = frozenset()
        self.special_token_ids = {}
        self._special_tokens = {}
        self._templates = {}
        self._compiled = {}

    def __repr__(self) -> str:
        return f"NoTokenizer({self.vocab_size} tokens)"

    @property
    def fast(self) -> NoReturn:  # type: ignore[override]
        """Not available: raises ValidationError, since tokens have no texts here.

        The methods of other tokenizers begin with this property.
        """
        refuse("tokenizer", "is needed for this")

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the model."""
        return self._vocab_size

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Raise ValidationError for parameters that need the texts of tokens."""
        for name in _NEED_TEXT:
            if getattr(sampling, name):
                refuse(name, "is about text")

    def encode(
        self, text: str, add_special_tokens: bool = True, limit: PromptLimit | None = None
    ) -> list[int]:
        """Raise ValidationError: there are no texts."""
        refuse("prompt", "is text; give token ids")

    def decode(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """Raise ValidationError: there are no texts."""
        refuse("tokens", "cannot become text")

    def token_bytes(self, token: int) -> bytes:
        """Return a name for the token: it has no bytes here."""
        return f"token_id:{token}".encode()

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """Raise ValidationError: there is no chat template."""
        refuse("messages", "need a chat template; give the prompt as token ids")


def refuse(field: str, problem: str) -> NoReturn:
    """Raise ValidationError for what an engine without a tokenizer cannot do."""
    raise ValidationError(
        field, f"{problem}: this engine was started without a tokenizer (skip_tokenizer_init)"
    )
