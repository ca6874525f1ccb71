"""Read a request's tools, hold an answer to the form of calls, and parse its calls.

/v1/chat/completions and /v1/responses write tools in two ways. Their structs both become a
`ToolUse`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from sidestep.frontend.parsers.events import AnswerParser, Function, ReasoningParser, ToolParser
from sidestep.frontend.server.schemas.structure import (
    Form,
    after_reasoning,
    calls_or_answer,
    form_of_calls,
    form_of_strict_tools,
)
from sidestep.frontend.server.service.service import Service
from sidestep.frontend.server.transport.errors import refused
from sidestep.ipc.common.registry import REASONING_PARSERS, TOOL_PARSERS, load

MOST_CALLS = 16
"""Largest number of calls of an answer that must have some."""

FunctionName = Annotated[str, msgspec.Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]


class FunctionTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """With tool_choice 'auto': whether the arguments must match the schema. Required calls always
    match it."""


ToolChoiceWord = Literal["auto", "none", "required"]


@dataclass(frozen=True)
class ToolUse:
    """Functions that an answer may call."""

    functions: tuple[FunctionTool, ...]
    must: bool
    """Whether the answer must consist of calls."""
    chosen: str | None
    """Name of the one function that must be called, if the request names one."""
    parallel: bool
    """Whether an answer may have several calls."""

    @classmethod
    def of(
        cls,
        functions: Sequence[FunctionTool],
        choice: ToolChoiceWord | None,
        chosen: str | None,
        parallel: bool | None,
        chosen_field: str,
    ) -> ToolUse | None:
        """Return the tools that these fields allow; None if the prompt must list no tools.

        chosen: the function that tool_choice names, in the field `chosen_field`. Raises ApiError.
        """
        if not functions:
            if chosen is not None or choice not in (None, "none"):
                raise refused("tool_choice", "has a meaning only with tools")
            return None
        if chosen is not None and chosen not in {function.name for function in functions}:
            raise refused(chosen_field, f"{chosen!r} is none of the tools")
        if choice == "none":
            return None
        return cls(
            tuple(functions),
            choice == "required" or chosen is not None,
            chosen,
            parallel is not False,
        )

    @property
    def most(self) -> int:
        """Largest number of calls of an answer that must have some."""
        return MOST_CALLS if self.parallel and self.chosen is None else 1

    def for_template(self) -> list[dict[str, Any]]:
        """Return the tools as chat templates read them."""
        return [
            {
                "type": "function",
                "function": {
                    "name": function.name,
                    "description": function.description or "",
                    "parameters": function.parameters or {"type": "object", "properties": {}},
                },
            }
            for function in self.functions
        ]

    def callable(self) -> list[Function]:
        """Return the functions that may be called: all, or the one that was chosen."""
        return [
            Function(function.name, function.parameters)
            for function in self.functions
            if self.chosen in (None, function.name)
        ]


class AnswerReader:
    """Parsers of one server for the tool calls and the reasoning of its answers."""

    def __init__(self, service: Service) -> None:
        self._service = service
        args = service.args
        self._make_reasoning: Callable[[str], ReasoningParser] | None = (
            load(REASONING_PARSERS[args.reasoning_parser]) if args.reasoning_parser else None
        )
        self._tools: type[ToolParser] | None = (
            load(TOOL_PARSERS[args.tool_call_parser]) if args.tool_call_parser else None
        )

    @property
    def tells_reasoning(self) -> bool:
        """Whether reasoning is separated from the answer."""
        return self._make_reasoning is not None

    def new_call_id(self) -> str:
        """Return an id for a call that the parser has found."""
        assert self._tools is not None  # without it no parser finds a call
        return self._tools.new_call_id()

    def check(self, use: ToolUse | None) -> None:
        """Raise ApiError if the template cannot list the tools, or the calls cannot be parsed."""
        if use is None:
            return
        if self._tools is None:
            raise refused(
                "tools", "this server was started without --tool-call-parser", "unsupported_field"
            )
        if "tools" not in (self._service.llm.get_tokenizer().template_for(use.functions) or ""):
            raise refused(
                "tools", "this model's chat template has no place for them", "unsupported_field"
            )

    def parser(self, prompt: str, use: ToolUse | None) -> AnswerParser | None:
        """Return a parser for one answer; None if the answer is text alone."""
        reasoning = self._make_reasoning(prompt) if self._make_reasoning else None
        calls = self._tools() if use is not None and self._tools is not None else None
        if reasoning is None and calls is None:
            return None
        return AnswerParser(reasoning, calls, 1 if use is not None and not use.parallel else None)

    def form(self, asked: Form | None, use: ToolUse | None, prompt: str) -> Form | None:
        """Return the form that the answer must have; None for any text.

        asked: the form that other fields demand. Raises ApiError.
        """
        form = asked
        if use is not None and self._tools is not None:
            special = self._service.llm.get_tokenizer().special_token_ids
            if use.must or asked is not None:
                # If calls are required, `asked` is the form of a later answer, which follows the
                # calls' outputs.
                calls = form_of_calls(self._tools, use.callable(), use.most, special)
                form = calls if use.must or asked is None else calls_or_answer(calls, asked)
            elif any(function.strict for function in use.functions):
                form = form_of_strict_tools(self._tools, use.callable())
        if form is None or self._make_reasoning is None:
            return form
        return after_reasoning(form, self._make_reasoning(prompt))

    def sampling(
        self, use: ToolUse | None, skip_special_tokens: bool | None = None
    ) -> dict[str, Any]:
        """Return the sampling parameters that parsing calls needs. Raises ApiError."""
        if use is None or self._tools is None or not self._tools.special_tokens:
            return {}
        # The parser's marks are special tokens, so the text must have them. The end-of-sequence
        # token is left out in any case.
        if skip_special_tokens:
            raise refused(
                "skip_special_tokens", "this model's tool calls are marked by special tokens"
            )
        return {"skip_special_tokens": False}
