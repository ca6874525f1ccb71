"""Convert the items of a request to /v1/responses to messages, as chat templates read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sidestep.frontend.input.template_files import Message
from sidestep.frontend.server.openai.chat_protocol import arguments_of
from sidestep.frontend.server.responses.protocol import (
    InputItem,
    InputText,
    OutputText,
    ReasoningText,
    RefusalText,
    ResponsesRequest,
)
from sidestep.frontend.server.transport.errors import refused

_NEEDS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}
_MAY_HAVE = {"function_call": ("parsed_arguments",), "reasoning": ("content", "summary")}
_NAMES = ("type", "id", "status")


def messages_of(request: ResponsesRequest) -> list[Message]:
    """Return the conversation. Raises ApiError, which names the field."""
    made: list[dict[str, Any]] = []
    if request.instructions:
        made.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*made, {"role": "user", "content": request.input}]
    for i, item in enumerate(request.input):
        _check(f"input[{i}]", item)
        _add(made, f"input[{i}]", item)
    return list[Message](made)


def _check(field: str, item: InputItem) -> None:
    """Raise ApiError for an item that lacks a field of its kind, or has one of another kind."""
    needs = _NEEDS[item.type]
    known = (*_NAMES, *needs, *_MAY_HAVE.get(item.type, ()))
    for name in item.__struct_fields__:
        value = getattr(item, name)
        if name in needs and value is None:
            raise refused(
                f"{field}.{name}", f"is required in an item of type {item.type}", "missing_field"
            )
        if name not in known and value is not None:
            raise refused(
                f"{field}.{name}", f"is no field of an item of type {item.type}", "unknown_field"
            )


def _add(made: list[dict[str, Any]], field: str, item: InputItem) -> None:
    """Append a message for the item. All items of one answer go into one assistant message."""
    if item.type == "function_call_output":
        made.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
    elif item.type == "message" and item.role != "assistant":
        role = "system" if item.role == "developer" else item.role
        made.append({"role": role, "content": _text(item.content)})
    elif item.type == "function_call":
        calls = _assistant(made, None).setdefault("tool_calls", [])
        calls.append(
            {
                "id": item.call_id,
                "type": "function",
                "function": {
                    "name": item.name,
                    "arguments": arguments_of(f"{field}.arguments", item.arguments or ""),
                },
            }
        )
    elif item.type == "reasoning":
        if text := _text(item.content):
            _assistant(made, "reasoning_content")["reasoning_content"] = text
    else:
        _assistant(made, "content")["content"] = _text(item.content)


def _assistant(made: list[dict[str, Any]], new: str | None) -> dict[str, Any]:
    """Return the message that an item of an answer belongs to.

    new: the message's key for the item. A message that already has this key, or the key of a later
    part of an answer, is complete, so a new message begins.
    """
    order = ("reasoning_content", "content", "tool_calls")
    last = made[-1] if made else None
    later = () if new is None else order[order.index(new) :]
    if last is None or last["role"] != "assistant" or any(last.get(key) for key in later):
        made.append({"role": "assistant", "content": ""})
    return made[-1]


def _text(
    content: str | Sequence[InputText | OutputText | RefusalText | ReasoningText] | None,
) -> str:
    """Return the text of a content, with one line for each part."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(
        part.refusal if isinstance(part, RefusalText) else part.text for part in content
    )
