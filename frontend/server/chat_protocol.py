"""The request of /v1/chat/completions, and its messages as chat templates read them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from sidestep.frontend.chat_template import Message
from sidestep.frontend.parsers.events import Function
from sidestep.frontend.server.errors import refused
from sidestep.frontend.server.fields import Count, NumLogprobs, SamplingFields
from sidestep.frontend.server.protocol import ToolCall


class TextPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A part of a message; text is the only kind there is."""

    type: Literal["text"]
    text: str


Text = str | list[TextPart]


class SystemMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="role", tag="system"):
    """What the model is to keep to."""

    content: Text
    name: str | None = None


class DeveloperMessage(SystemMessage, kw_only=True, forbid_unknown_fields=True, tag_field="role", tag="developer"):
    """The system's message by its newer name: the same for every model that is served here."""


class UserMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="role", tag="user"):
    """What the user says."""

    content: Text
    name: str | None = None


class AssistantMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="role", tag="assistant"):
    """What the model has said."""

    content: Text | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    refusal: None = None


class ToolMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="role", tag="tool"):
    """What a call has given."""

    content: Text
    tool_call_id: str


ChatMessage = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage
_ROLES: dict[type, str] = {SystemMessage: "system", DeveloperMessage: "system", UserMessage: "user",
                           AssistantMessage: "assistant", ToolMessage: "tool"}
"""As templates know them."""


class FunctionTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call."""

    name: Annotated[str, msgspec.Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """With tool_choice 'auto': the arguments keep to the schema. Calls that are required do so in any case."""


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool; functions are the only kind there is."""

    type: Literal["function"]
    function: FunctionTool


class ChosenFunction(msgspec.Struct, forbid_unknown_fields=True):
    """The name of one of the tools."""

    name: str


class NamedToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The function that is to be called."""

    type: Literal["function"] = "function"
    function: ChosenFunction


class ChatRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The body of a request to /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedToolChoice | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """What else the model's template is given, such as {"enable_thinking": false}."""
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    # Not implemented: see fields.NOT_YET.
    functions: Any = None
    function_call: Any = None
    parallel_tool_calls: Any = None
    reasoning_effort: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    verbosity: Any = None
    store: Any = None
    metadata: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None


def max_tokens_of(request: ChatRequest) -> int | None:
    """The limit under either of its names. Raises ApiError when they differ."""
    new, old = request.max_completion_tokens, request.max_tokens
    if new is not None and old is not None and new != old:
        raise refused("max_tokens", f"is {old}, and max_completion_tokens, its new name, is {new}")
    return old if new is None else new


def num_logprobs_of(request: ChatRequest) -> int | None:
    """How many of the most probable tokens are asked for. Raises ApiError."""
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise refused("top_logprobs", "has a meaning only with logprobs: true")
    return None


def template_messages(messages: list[ChatMessage]) -> list[Message]:
    """As templates of the hub read them. Raises ApiError, which names the field."""
    return [_template_message(i, message) for i, message in enumerate(messages)]


def _template_message(index: int, message: ChatMessage) -> Message:
    content: Any = message.content
    calls = message.tool_calls if isinstance(message, AssistantMessage) else None
    if content is None:
        if not calls:
            raise refused(f"messages[{index}].content", "is required in a message without tool calls")
        content = ""  # templates join it to other text
    elif not isinstance(content, str):
        content = "\n".join(part.text for part in content)
    made: dict[str, Any] = {"role": _ROLES[type(message)], "content": content}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name, None)) is not None:
            made[name] = value
    if calls:
        made["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {
                "name": call.function.name, "arguments": _arguments(f"messages[{index}].tool_calls[{i}]", call)}}
            for i, call in enumerate(calls)]
    return made


def _arguments(path: str, call: ToolCall) -> Any:
    """Templates write them as JSON themselves, so they want what the JSON says."""
    try:
        return msgspec.json.decode(call.function.arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        raise refused(f"{path}.function.arguments", "is not valid JSON") from None


def tools_in_use(request: ChatRequest) -> list[dict[str, Any]] | None:
    """The tools that the model is told of. Raises ApiError."""
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none"):
            raise refused("tool_choice", "has a meaning only with tools")
        return None
    if choice == "none":
        return None
    return [_template_tool(tool) for tool in request.tools]


def functions_of(request: ChatRequest) -> list[Function]:
    """The functions that may be called: all, or the one that was chosen. Raises ApiError for another one's name."""
    functions = [Function(tool.function.name, tool.function.parameters) for tool in request.tools or ()]
    if isinstance(request.tool_choice, NamedToolChoice):
        name = request.tool_choice.function.name
        functions = [function for function in functions if function.name == name]
        if not functions:
            raise refused("tool_choice.function.name", f"{name!r} is none of the tools")
    return functions


def _template_tool(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.function.name, "description": tool.function.description or "",
                "parameters": tool.function.parameters or {"type": "object", "properties": {}}}
    return {"type": "function", "function": function}
