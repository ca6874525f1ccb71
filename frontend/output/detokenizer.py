"""The conversion of tokens to text, one at a time, without half characters or retracted text.

A token's text can still change after the token has come, for two reasons. Its bytes may be only the
beginning of a character, or a stop string may begin in it and end in another token. The bytes wait
inside the tokenizers library's DecodeStream (`TokenStream`). Text that could still become a stop
string is held back here (`Detokenizer`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from sidestep.frontend.input.tokenizer import Tokenizer

_CONTEXT = 10
"""Prompt tokens that the stream begins with.

With them, a first token that continues a word is decoded as one. The number leaves room to leave
out the tokens of a character that is cut at either end.
"""
_MAX_PENDING = 32
"""Tokens that may wait for the rest of a character.

No character needs more than 4. The library decodes all waiting tokens again with each token, so a
model that emits stray bytes without end would cost ever more.
"""
_MAX_CHARACTER = 4
_HALF = "\N{REPLACEMENT CHARACTER}"


class TokenStream:
    """Text as tokens produce it; `step` returns whole characters."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._fast = tokenizer.fast
        self._skip_special = skip_special_tokens
        # The library would keep and decode again all skipped tokens that come in a row. A model
        # that continues after its end of sequence produces many of them.
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        tail = [token for token in prompt_token_ids[-_CONTEXT:] if token not in self._skipped]
        context, rest = self._split_at_character(tail)
        self._restart(context)
        # A prompt may end inside a character: its first bytes wait like those of the output.
        for token in rest:
            self._step(token)
        self._echo = self._text_of_pending(self._pending)
        """The text that the prompt's own end decodes to.

        It is not part of the output if it stays so.
        """

    def step(self, token: int) -> str | None:
        """Return the text that this token completes, if any."""
        if token in self._skipped:
            return None
        piece = self._step(token)
        if piece and self._echo:
            piece = self._without_echo(piece)
        return piece

    def flush(self) -> str:
        """Return the text of the waiting tokens: what a full decode shows for half a character."""
        tail = self._without_echo(self._text_of_pending(self._pending))
        self._pending.clear()
        return tail

    def _step(self, token: int) -> str | None:
        try:
            piece = self._stream.step(self._fast, token)
        except Exception as error:  # the library's own type is a bare Exception
            if "prefix" not in str(error).lower():
                raise
            # The token changed the text of those before it: byte-fallback vocabularies do so when
            # bytes turn out to be no character. Text that has been returned stays, and the decoding
            # begins again at this token.
            piece = self._decode([*self._pending, token])
            self._restart([token])
            return piece or None
        if piece is not None:
            self._last = [*self._pending, token] if self._pending else [token]
            self._pending.clear()
            return piece
        self._pending.append(token)
        return self._give_up() if len(self._pending) >= _MAX_PENDING else None

    def _without_echo(self, piece: str) -> str:
        same = len(os.path.commonprefix((piece, self._echo)))
        self._echo = ""
        return piece[same:]

    def _give_up(self) -> str | None:
        """Release the tokens that can no longer become a character.

        Keep those that may be the beginning of one.
        """
        everything = self._text_of_pending(self._pending)
        head, rest = self._pending, list[int]()
        for size in range(1, _MAX_CHARACTER):
            # If a cut does not fall inside a character, both sides together decode to the same.
            first, second = self._pending[:-size], self._pending[-size:]
            if self._text_of_pending(first) + self._decode(second) == everything:
                head, rest = first, second
                break
        text = self._text_of_pending(head)
        self._restart(self._last)
        for token in rest:
            self._step(token)
        return text or None

    def _restart(self, context: list[int]) -> None:
        self._stream = DecodeStream(ids=context, skip_special_tokens=self._skip_special)
        self._last = context
        self._pending: list[int] = []

    def _text_of_pending(self, pending: list[int]) -> str:
        """Return the text of pending tokens, decoded after the tokens that came before.

        The earlier tokens decide on details such as a leading space.
        """
        if not pending:
            return ""
        return self._decode(self._last + pending)[len(self._decode(self._last)) :]

    def _decode(self, tokens: list[int]) -> str:
        return (
            str(self._fast.decode(tokens, skip_special_tokens=self._skip_special)) if tokens else ""
        )

    def _split_at_character(self, tokens: list[int]) -> tuple[list[int], list[int]]:
        """Return the tokens up to the last whole character, and the rest."""
        for end in range(len(tokens), max(0, len(tokens) - _MAX_CHARACTER) - 1, -1):
            # With byte fallback, half a character at the beginning spoils all bytes that follow it.
            for start in range(max(1, min(_MAX_CHARACTER, end))):
                if not self._decode(tokens[start:end]).endswith(_HALF):
                    return tokens[start:end], tokens[end:]
        return [], tokens[-_MAX_CHARACTER:]


class Detokenizer:
    """The text of one request's output."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._stream = TokenStream(tokenizer, prompt_token_ids, skip_special_tokens)
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._unchecked = min_tokens if self._stop else 0
        """Tokens still to come whose text may complete a stop string without ending the request."""
        self._all = ""
        self.text = ""
        """Text that will not change."""

    def add(self, token: int) -> str | None:
        """Add a token, and return the stop string that it completes, if any.

        `text` then ends before or with the stop string.
        """
        piece = self._stream.step(token)
        if not self._stop:
            if piece:
                self.text += piece
            return None
        return self._add_checked(piece or "")

    def finish(self) -> str | None:
        """End the text: text that was held back belongs to it after all.

        The bytes of a character that was cut off may still complete a stop string, which is
        returned.
        """
        tail = self._stream.flush()
        stop = self._add_checked(tail) if self._stop else None
        if stop is None:
            self.text = self._all if self._stop else self.text + tail
        return stop

    def _add_checked(self, piece: str) -> str | None:
        before = len(self._all)
        self._all += piece
        may_stop = self._unchecked == 0
        self._unchecked -= not may_stop
        if not piece:
            return None
        stop = self._find_stop(before) if may_stop else None
        if stop is None:
            self.text = self._all[: len(self._all) - self._held()]
        return stop

    def _find_stop(self, before: int) -> str | None:
        """Return the stop string that ends first, and cut the text there.

        It must end after the first `before` characters.
        """
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            at = self._all.find(stop, max(0, before - len(stop) + 1))
            if at >= 0 and (best is None or (at + len(stop), at) < best[:2]):
                best = (at + len(stop), at, stop)
        if best is None:
            return None
        end, at, stop = best
        self.text = self._all[: end if self._include_stop else at]
        return stop

    def _held(self) -> int:
        """Return the number of characters at the end that could begin a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._all)), longest, -1):
                if self._all.endswith(stop[:length]):
                    longest = length
                    break
        return longest
