"""Tokens to text, one at a time: never half a character, never text that is taken back later.

Two things can change what a token's text is after it has come: bytes that are only the beginning of a character, and a
stop string that begins in one token and ends in another. The first waits inside the tokenizers library's DecodeStream;
the second is held back here, as many characters as could still become a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from sidestep.frontend.tokenizer import Tokenizer

_CONTEXT = 6
"""Prompt tokens that the stream begins with, so that a first token that continues a word is decoded as one."""


class Detokenizer:
    """The text of one request's output."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, stop: Sequence[str] = (),
                 include_stop: bool = False, skip_special_tokens: bool = True) -> None:
        self._fast = tokenizer.fast
        self._skip_special = skip_special_tokens
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._hold = max(map(len, self._stop), default=1) - 1
        self._token_ids: list[int] = []
        self._context = list(prompt_token_ids[-_CONTEXT:])
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=skip_special_tokens)
        self._all = ""
        self.text = ""
        """Text that will not change."""

    def add(self, token: int) -> str | None:
        """One more token. Returns the stop string that it completes, if any; `text` then ends before it (or with it)."""
        self._token_ids.append(token)
        piece = self._step(token)
        if not piece:
            return None
        searched = max(0, len(self._all) - self._hold)
        self._all += piece
        if not self._stop:
            self.text = self._all
            return None
        stop = self._find_stop(searched)
        if stop is None:
            self.text = self._all[:max(len(self.text), len(self._all) - self._held())]
        return stop

    def finish(self) -> str | None:
        """The end: what was held back belongs to the text after all. May still complete a stop string, with the bytes
        of a character that was cut off."""
        tail = self._pending_tail()
        searched = max(0, len(self._all) - self._hold)
        self._all += tail
        stop = self._find_stop(searched) if tail and self._stop else None
        if stop is None:
            self.text = self._all
        return stop

    def _step(self, token: int) -> str | None:
        try:
            return self._stream.step(self._fast, token)
        except Exception as error:  # the library's own type is a bare Exception
            if "prefix" not in str(error).lower():
                raise
            # It rarely loses its place on sequences that no encoder would give: start again from here.
            self._stream = DecodeStream(ids=[], skip_special_tokens=self._skip_special)
            return self._stream.step(self._fast, token)

    def _find_stop(self, start: int) -> str | None:
        """The stop string that ends first, looking from `start`; cuts the text there."""
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            at = self._all.find(stop, start)
            if at >= 0 and (best is None or (at + len(stop), at) < best[:2]):
                best = (at + len(stop), at, stop)
        if best is None:
            return None
        end, at, stop = best
        self.text = self._all[:end if self._include_stop else at]
        return stop

    def _held(self) -> int:
        """Characters at the end that could be the beginning of a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._all)), longest, -1):
                if self._all.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _pending_tail(self) -> str:
        """The text of bytes that wait for the rest of their character: what a full decode shows for them."""
        full = self._fast.decode(self._context + self._token_ids, skip_special_tokens=self._skip_special)
        before = self._fast.decode(self._context, skip_special_tokens=self._skip_special)
        shown = before + self._all
        return str(full[len(shown):]) if full.startswith(shown) else ""
