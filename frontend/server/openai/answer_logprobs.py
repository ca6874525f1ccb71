"""Log-probabilities in the shapes of OpenAI's API.

The bytes of a token are given too, because a token may be a part of a character.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence

from sidestep.frontend.input.tokenizer import Tokenizer
from sidestep.frontend.output.outputs import Logprob, RequestOutput
from sidestep.frontend.server.schemas.protocol import (
    CompletionLogprobs,
    ContentLogprob,
    PromptLogprob,
    TokenLogprob,
)
from sidestep.ipc.params.sampling_params import SamplingParams

LOWEST = -9999.0
"""Log-probability that replaces minus infinity, which JSON does not have."""
Entries = Mapping[int, Logprob]
"""Log-probabilities at one position, by token id; the position's own token comes first."""


def content_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[Entries], most: int
) -> list[ContentLogprob]:
    """Return the log-probabilities of an answer's tokens, for chats and responses.

    most: number of alternatives of each token.
    """
    return [_content(tokenizer, entries, most) for entries in tokens]


def _content(tokenizer: Tokenizer, entries: Entries, most: int) -> ContentLogprob:
    own = next(iter(entries))
    best = sorted(entries, key=lambda token: entries[token].rank)[:most]
    token = _token(tokenizer, own, entries[own])
    return ContentLogprob(
        token.token,
        token.logprob,
        token.bytes,
        [_token(tokenizer, other, entries[other]) for other in best],
    )


def _token(tokenizer: Tokenizer, token: int, found: Logprob) -> TokenLogprob:
    data = tokenizer.token_bytes(token)
    return TokenLogprob(data.decode("utf-8", "replace"), _number(found), list(data))


def _number(found: Logprob) -> float:
    return max(found.logprob, LOWEST)


def prompt_logprobs(tokens: Sequence[Entries | None]) -> list[dict[int, PromptLogprob] | None]:
    """Return the log-probabilities of a prompt's tokens, in the shape of vLLM."""
    return [
        None
        if entries is None
        else {
            token: PromptLogprob(_number(found), found.rank, found.decoded_token)
            for token, found in entries.items()
        }
        for entries in tokens
    ]


class CompletionLogprobWriter:
    """Convert the log-probabilities of one completion, which may come in several outputs."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, echo: bool) -> None:
        """Begin a completion.

        echo: the prompt comes first, as the tokenizer writes it without special tokens.
        """
        self._tokenizer = tokenizer
        self._most = params.logprobs or 0
        self._skipped = tokenizer.special_ids if params.skip_special_tokens else frozenset()
        self._echo = echo
        # Offsets count characters of the text. A token that ends inside a character adds only the
        # characters that it completes.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def write(self, output: RequestOutput) -> CompletionLogprobs:
        """Return the log-probabilities of an output's new tokens."""
        made, completion = CompletionLogprobs([], [], [], []), output.outputs[0]
        if self._echo:
            self._echo = False
            # There are fewer entries if the request ended before its prompt was computed.
            for token, prompt_entries in zip(
                output.prompt_token_ids, output.prompt_logprobs or (), strict=False
            ):
                self._add(made, token, prompt_entries, token in self._tokenizer.special_ids)
        for token, entries in zip(completion.token_ids, completion.logprobs or (), strict=False):
            self._add(made, token, entries, token in self._skipped)
        return made

    def _add(
        self, made: CompletionLogprobs, token: int, entries: Entries | None, is_skipped: bool
    ) -> None:
        data = self._tokenizer.token_bytes(token)
        made.tokens.append(data.decode("utf-8", "replace"))
        made.text_offset.append(self._offset)
        if not is_skipped:
            self._offset += len(self._decoder.decode(data))
        made.token_logprobs.append(None if entries is None else _number(entries[token]))
        made.top_logprobs.append(None if entries is None else self._by_text(token, entries))

    def _by_text(self, own: int, entries: Entries) -> dict[str, float]:
        made: dict[str, float] = {}
        for token, found in entries.items():
            # Parts of characters have the same text: the first one is kept.
            if token == own or found.rank <= self._most:
                made.setdefault(self._tokenizer.token_text(token), _number(found))
        return made


def joined(first: CompletionLogprobs | None, second: CompletionLogprobs) -> CompletionLogprobs:
    """Return the log-probabilities of `first`, then those of `second`."""
    if first is None:
        return second
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )
