"""Encode the events of a stream.

The bytes that all events of a choice share are made once. Each further event costs the encoding of
its own text and one join.
"""

from __future__ import annotations

from collections.abc import Sequence

from sidestep.frontend.server.schemas.protocol import ChatLogprobs, CompletionLogprobs, Delta, Usage
from sidestep.frontend.server.transport.lines import encode_line


class EventEncoder:
    """Encoder of the events of one choice of one stream."""

    def __init__(self, index: int, head: dict[str, object], key: str, include_usage: bool) -> None:
        """Make the bytes that all events share.

        head: the fields of each event besides its choice. key: the choice's key for new content,
        'delta' or 'text'.
        """
        tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._no_content = b'""' if key == "text" else b"{}"
        self._before = b'data: %b,"choices":[{"index":%d,"%b":' % (
            encode_line(head)[:-1],
            index,
            key.encode(),
        )
        self._set_tail(tail)

    def _set_tail(self, tail: bytes) -> None:
        self._rest = b',"finish_reason":null}]' + tail
        self._after = b',"logprobs":null' + self._rest
        self._tail = tail

    def set_usage(self, usage: Usage) -> None:
        """Give the events from here on these counts of tokens."""
        self._set_tail(b',"usage":%b}\n\n' % encode_line(usage))

    def content(self, text: str, logprobs: ChatLogprobs | None = None, ids: bytes = b"") -> bytes:
        """Return the event with new text of a chat. ids: see IdsOfChoice."""
        return b'%b{"content":%b}%b' % (self._before, encode_line(text), self._with(logprobs, ids))

    def text(
        self, text: str, logprobs: CompletionLogprobs | None = None, ids: bytes = b""
    ) -> bytes:
        """Return the event with new text of a completion. ids: see IdsOfChoice."""
        return b"%b%b%b" % (self._before, encode_line(text), self._with(logprobs, ids))

    def delta(self, delta: Delta, logprobs: ChatLogprobs | None = None, ids: bytes = b"") -> bytes:
        """Return the event with any other new part of a chat. ids: see IdsOfChoice."""
        return b"%b%b%b" % (self._before, encode_line(delta), self._with(logprobs, ids))

    def end(
        self,
        finish_reason: str,
        stop_reason: int | str | None,
        logprobs: ChatLogprobs | CompletionLogprobs | None = None,
        ids: bytes = b"",
    ) -> bytes:
        """Return the choice's last event, which has no new content. ids: see IdsOfChoice."""
        return b'%b%b,"logprobs":%b%b,"finish_reason":%b,"stop_reason":%b}]%b' % (
            self._before,
            self._no_content,
            encode_line(logprobs),
            ids,
            encode_line(finish_reason),
            encode_line(stop_reason),
            self._tail,
        )

    def _with(self, logprobs: ChatLogprobs | CompletionLogprobs | None, ids: bytes) -> bytes:
        """Return the bytes that follow the new content."""
        if logprobs is None and not ids:
            return self._after
        return b',"logprobs":%b%b%b' % (encode_line(logprobs), ids, self._rest)


class IdsOfChoice:
    """Token ids of one choice for the events of its stream, if the request asks for them."""

    def __init__(self, asked: bool) -> None:
        self.asked = asked
        self._untold: list[int] = []

    def add(self, ids: Sequence[int]) -> None:
        """Note new tokens for the next event."""
        if self.asked:
            self._untold += ids

    def take(self) -> bytes:
        """Return the next event's field, with all tokens that no event has had yet."""
        if not self._untold:
            return b""
        data = b',"token_ids":%b' % encode_line(self._untold)
        self._untold.clear()
        return data

    def of_prompt(self, ids: Sequence[int]) -> bytes:
        """Return the field of the first event, with the prompt's tokens."""
        return b',"prompt_token_ids":%b' % encode_line(list(ids)) if self.asked else b""


def usage_event(head: dict[str, object], usage: Usage) -> bytes:
    """Return the event with the counts of tokens, which follows the last choice's end."""
    return b"data: %b\n\n" % encode_line({**head, "choices": [], "usage": usage})
