"""The maker of logits controls: a request's changes to its logits, checked and in token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from sidestep.frontend.input.tokenizer import Tokenizer
from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.params.logits_controls import MAX_BAD_WORD_TOKENS, Controls
from sidestep.ipc.params.sampling_params import SamplingParams


class ControlsMaker:
    """The maker of controls, for one vocabulary and one engine's logits processors."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, processors: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._processors = processors

    def make(self, sampling: SamplingParams) -> Controls:
        """Return the controls of a request; raises ValidationError, which names the field."""
        bias, allowed = sampling.logit_bias or {}, sampling.allowed_token_ids or ()
        self._check_tokens("logit_bias", bias)
        self._check_tokens("allowed_token_ids", allowed)
        self._check_processors(sampling.extra_args or {})
        return Controls(
            presence_penalty=float(sampling.presence_penalty),
            frequency_penalty=float(sampling.frequency_penalty),
            repetition_penalty=float(sampling.repetition_penalty),
            logit_bias={int(token): float(value) for token, value in bias.items()},
            allowed_token_ids=list(dict.fromkeys(allowed)),
            bad_words=self._tokens_of_words(sampling.bad_words or ()),
            extra_args=sampling.extra_args or {},
            has_grammar=sampling.structured_outputs is not None,
            logprobs=-1 if sampling.logprobs is None else sampling.logprobs,
            prompt_logprobs=-1 if sampling.prompt_logprobs is None else sampling.prompt_logprobs,
        )

    def _check_tokens(self, field: str, tokens: Iterable[int]) -> None:
        for token in tokens:
            if token >= self._vocab_size:
                raise ValidationError(
                    field, f"{token} is not a token id: the model has {self._vocab_size}"
                )

    def _check_processors(self, extra: Mapping[str, Any]) -> None:
        for name, arguments in extra.items():
            try:
                msgspec.msgpack.encode(arguments)
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                raise ValidationError(
                    "extra_args", f"of {name!r} cannot be sent: {error}"
                ) from None
            if name not in self._processors:
                known = (
                    f"it has {', '.join(self._processors)}" if self._processors else "it has none"
                )
                raise ValidationError(
                    "extra_args", f"{name!r} is no logits processor of this engine; {known}"
                )

    def _tokens_of_words(self, words: Iterable[str]) -> list[list[int]]:
        """Return the token ids of each word, alone and after a space.

        A word inside a text most often begins with a space, which is part of its first token.
        """
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            check_text("bad_words", word)
            for text in (word, f" {word.lstrip()}"):
                tokens = tuple(self._tokenizer.encode(text, add_special_tokens=False))
                if len(tokens) > MAX_BAD_WORD_TOKENS:
                    raise ValidationError(
                        "bad_words",
                        f"{word!r} has {len(tokens)} tokens; {MAX_BAD_WORD_TOKENS} are the most",
                    )
                if tokens:
                    found[tokens] = None
        return [list(tokens) for tokens in found]


def check_text(field: str, text: str) -> None:
    """Raise ValidationError for a text with lone surrogates.

    JSON can carry such a text, but UTF-8 cannot.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValidationError(field, "is not valid text: it cannot be written as UTF-8") from None
