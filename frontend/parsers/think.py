"""The parsers of reasoning between `<think>` and `</think>`, before the answer."""

from __future__ import annotations

from sidestep.frontend.parsers.events import Content, Event, Reasoning, partial_length

_OPEN, _CLOSE = "<think>", "</think>"


class ThinkParser:
    """The parser of one answer.

    White space around the reasoning belongs neither to the reasoning nor to the answer.
    """

    def __init__(self, begins_inside: bool, prompt: str) -> None:
        """Begin with an answer to `prompt`.

        begins_inside: the prompt, or the model's habit, has opened the reasoning already.
        """
        ended = prompt.rstrip().endswith(_CLOSE)
        self.marks: tuple[str | None, str] | None = (
            None if ended else (None if begins_inside else _OPEN, _CLOSE)
        )
        self._inside = begins_inside
        self._at_start = True
        """Whether an opening mark may still come."""
        self._is_first = True
        """Whether no event of the part that is being read has been returned."""
        self._held = ""

    def feed(self, text: str) -> list[Event]:
        """Return the events that the new text decides."""
        if not self._inside and not self._at_start and not self._is_first:
            return [Content(text)] if text else []
        self._held += text
        events: list[Event] = []
        if self._at_start and not self._read_start():
            return events
        if self._inside:
            self._read_reasoning(events)
        if not self._inside:
            self._read_answer(events)
        return events

    def finish(self) -> list[Event]:
        """Return the event of the text that was held back.

        White space at the end of reasoning that was cut off is dropped.
        """
        held, self._held = self._held, ""
        if not self._inside:
            return [Content(held)] if held and (self._at_start or held.strip()) else []
        rest = held.strip() if self._is_first else held.rstrip()
        return [Reasoning(rest)] if rest else []

    def _read_start(self) -> bool:
        """Read an opening mark; return False while the text may still begin with one."""
        text = self._held.lstrip()
        if text.startswith(_OPEN):
            self._held, self._inside = text[len(_OPEN) :], True
        elif _OPEN.startswith(text):
            return False
        elif not self._inside:
            self._is_first = False  # an answer without reasoning is passed on as it is
        self._at_start = False
        return True

    def _read_reasoning(self, events: list[Event]) -> None:
        if self._is_first:
            self._held = self._held.lstrip()
        at = self._held.find(_CLOSE)
        size = at if at >= 0 else len(self._held) - partial_length(self._held, _CLOSE)
        known = self._held[:size].rstrip()
        if known:
            events.append(Reasoning(known))
            self._is_first = False
        if at >= 0:
            self._held, self._inside, self._is_first = self._held[at + len(_CLOSE) :], False, True
        else:
            self._held = self._held[len(known) :]

    def _read_answer(self, events: list[Event]) -> None:
        text = self._held.lstrip() if self._is_first else self._held
        self._held = ""
        if text:
            self._is_first = False
            events.append(Content(text))


class Qwen3ReasoningParser(ThinkParser):
    """A parser for models that open their reasoning themselves, or whose template has done so.

    Without a mark there is no reasoning.
    """

    def __init__(self, prompt: str) -> None:
        super().__init__(prompt.rstrip().endswith(_OPEN), prompt)


class DeepSeekR1ReasoningParser(ThinkParser):
    """A parser for models that reason from the start.

    An opening mark may or may not come.
    """

    def __init__(self, prompt: str) -> None:
        super().__init__(not prompt.rstrip().endswith(_CLOSE), prompt)
