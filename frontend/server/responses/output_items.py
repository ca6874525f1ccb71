"""Items of an answer of /v1/responses as they grow, and the events that describe their growth."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import msgspec

from sidestep.frontend.parsers.events import CallArguments, CallBegin, Event, Reasoning
from sidestep.frontend.server.responses.protocol import (
    CallItem,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
)
from sidestep.frontend.server.schemas.protocol import ContentLogprob
from sidestep.frontend.server.transport.errors import ApiError
from sidestep.frontend.server.transport.lines import encode_line


class Items:
    """Items of an answer: one for each stretch of reasoning or text, and for each call."""

    def __init__(self, new_call_id: Callable[[], str]) -> None:
        self.made: list[Item] = []
        self._new_call_id = new_call_id

    @property
    def last(self) -> Item:
        """Item that is growing."""
        return self.made[-1]

    def opens(self, event: Event) -> bool:
        """Return whether this event begins a new item."""
        if isinstance(event, CallBegin | CallArguments):
            return isinstance(event, CallBegin)
        kind = ReasoningItem if isinstance(event, Reasoning) else MessageItem
        return not self.made or not isinstance(self.last, kind)

    def open(self, event: Event | None) -> None:
        """Begin an empty item of the event's kind; without an event, a message."""
        name = uuid.uuid4().hex
        if isinstance(event, CallBegin):
            self.made.append(
                CallItem(
                    id=f"fc_{name}",
                    call_id=self._new_call_id(),
                    name=event.name,
                    arguments="",
                    status="in_progress",
                )
            )
        elif isinstance(event, Reasoning):
            self.made.append(
                ReasoningItem(
                    id=f"rs_{name}", status="in_progress", content=[ReasoningText(text="")]
                )
            )
        else:
            self.made.append(
                MessageItem(id=f"msg_{name}", status="in_progress", content=[OutputText(text="")])
            )

    def grow(self, event: Event) -> str:
        """Add an event's text to the last item, and return the text."""
        if isinstance(event, CallBegin):
            return ""
        last = self.last
        if isinstance(last, CallItem):
            last.arguments += event.text
        else:
            last.content[0].text += event.text
        return event.text

    def lacks_end(self) -> bool:
        """Return whether a message is missing: an answer without calls ends with one."""
        return not self.made or isinstance(self.last, ReasoningItem)

    def add_logprobs(self, logprobs: list[ContentLogprob]) -> None:
        """Add log-probabilities to the last item.

        It is a message, because requests for log-probabilities with calls or reasoning are refused.
        """
        if logprobs and isinstance(self.last, MessageItem):
            part = self.last.content[0]
            part.logprobs = [*(part.logprobs or ()), *logprobs]


class Events:
    """Make the numbered events of a stream."""

    def __init__(self) -> None:
        self._number = -1

    def make(self, kind: str, **fields: Any) -> bytes:
        """Return one event."""
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (
            kind.encode(),
            encode_line({"type": kind, **fields, "sequence_number": self._number}),
        )

    def error(self, error: ApiError) -> bytes:
        """Return the last event of a stream that fails."""
        detail = error.body.error
        return self.make("error", code=detail.code, message=detail.message, param=detail.param)

    def opening(self, items: Items) -> bytes:
        """Return the events for a new, empty last item."""
        item, index = items.last, len(items.made) - 1
        if isinstance(item, CallItem):
            return self.make("response.output_item.added", output_index=index, item=item)
        part = item.content[0]
        shown = msgspec.structs.replace(item, content=[])
        return self.make("response.output_item.added", output_index=index, item=shown) + self.make(
            "response.content_part.added", part=part, **_position(items)
        )

    def growth(self, items: Items, text: str, logprobs: list[ContentLogprob]) -> bytes:
        """Return the events for new text of the last item."""
        return self.make(
            f"response.{_kind(items.last)}.delta",
            delta=text,
            **_of_text(items.last, logprobs),
            **_position(items),
        )

    def closing(self, items: Items) -> bytes:
        """Return the events for the complete last item, if there is one."""
        if not items.made:
            return b""
        item, index = items.last, len(items.made) - 1
        item.status = "completed"
        if isinstance(item, CallItem):
            data = self.make(
                f"response.{_kind(item)}.done",
                name=item.name,
                arguments=item.arguments,
                **_position(items),
            )
        else:
            part = item.content[0]
            data = self.make(
                f"response.{_kind(item)}.done",
                text=part.text,
                **_of_text(item, getattr(part, "logprobs", None) or []),
                **_position(items),
            ) + self.make("response.content_part.done", part=part, **_position(items))
        return data + self.make("response.output_item.done", output_index=index, item=item)


def _kind(item: Item) -> str:
    """Return the part of the events' names for an item's text."""
    if isinstance(item, CallItem):
        return "function_call_arguments"
    return "reasoning_text" if isinstance(item, ReasoningItem) else "output_text"


def _of_text(item: Item, logprobs: list[ContentLogprob]) -> dict[str, Any]:
    """Return the further fields of events of an answer's text."""
    return {"logprobs": logprobs} if isinstance(item, MessageItem) else {}


def _position(items: Items) -> dict[str, Any]:
    """Return the fields that name the position of the last item's text."""
    position = {"item_id": items.last.id, "output_index": len(items.made) - 1}
    return position if isinstance(items.last, CallItem) else {**position, "content_index": 0}
