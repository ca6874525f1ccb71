"""The request of /v1/chat/completions, and its messages as chat templates read them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from sidestep.frontend.input.chat_template import Message
from sidestep.frontend.server.openai.prompt import Effort
from sidestep.frontend.server.openai.tool_use import FunctionTool, ToolChoiceWord, ToolUse
from sidestep.frontend.server.schemas.fields import Count, NumLogprobs, SamplingFields
from sidestep.frontend.server.transport.errors import refused


class TextPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A part of a message; text is the only kind there is."""

    type: Literal["text"]
    text: str


Text = str | list[TextPart]


class SystemMessage(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="role", tag="system"
):
    """What the model is to keep to."""

    content: Text
    name: str | None = None


class DeveloperMessage(
    SystemMessage, kw_only=True, forbid_unknown_fields=True, tag_field="role", tag="developer"
):
    """The system's message by its newer name: the same for every model that is served here."""


class UserMessage(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="role", tag="user"
):
    """What the user says."""

    content: Text
    name: str | None = None


Nothing = Annotated[list[Any], msgspec.Meta(max_length=0)]


class PastCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A call that the model has made before, as client libraries send it back."""

    id: str
    type: Literal["function"] = "function"
    function: PastFunction
    index: int | None = None
    """Its place in the message's list of calls. The list itself has the same order."""
    provider_specific_fields: dict[str, Any] | None = None
    """Notes of a client library about the answer that had this. The prompt does not contain
    them."""


class PastFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The function of such a call."""

    name: str
    arguments: str
    """JSON, as the model wrote it."""
    parsed_arguments: Any = None
    """The arguments, as a client library has parsed them."""
    provider_specific_fields: dict[str, Any] | None = None
    """See PastCall."""


class AssistantMessage(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="role", tag="assistant"
):
    """An earlier answer of the model. The last fields are empty in answers of this server, or
    repeat it.
    """

    content: Text | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[PastCall] | None = None
    refusal: str | None = None
    """Text that another model gave in the place of content."""
    parsed: Any = None
    """The content, as a client library has parsed it."""
    annotations: Nothing | None = None
    audio: None = None
    function_call: None = None
    images: Nothing | None = None
    provider_specific_fields: dict[str, Any] | None = None
    """See PastCall."""


class ToolMessage(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="role", tag="tool"
):
    """What a call has given."""

    content: Text
    tool_call_id: str
    name: str | None = None


ChatMessage = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage
_ROLES: dict[type, str] = {
    SystemMessage: "system",
    DeveloperMessage: "system",
    UserMessage: "user",
    AssistantMessage: "assistant",
    ToolMessage: "tool",
}
"""As templates know them."""


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
    tool_choice: ToolChoiceWord | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """False: return only the first of the model's calls."""
    reasoning_effort: Effort | None = None
    """Given to the model's template as the variable `reasoning_effort`, or as `enable_thinking`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """What else the model's template is given, such as {"enable_thinking": false}."""
    add_generation_prompt: bool | None = None
    """Whether the prompt ends with the beginning of an answer; true if not given."""
    continue_final_message: bool | None = None
    """Continue the last message instead of beginning a new one."""
    add_special_tokens: bool | None = None
    """Whether the prompt gets the tokens that the model puts around every text, beside those that
    its template writes; false if not given."""
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    # Not implemented: see fields.NOT_YET.
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    verbosity: Any = None
    chat_template: Any = None


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
    if content is None and isinstance(message, AssistantMessage):
        content = message.refusal
    calls = message.tool_calls if isinstance(message, AssistantMessage) else None
    if content is None:
        if not calls:
            raise refused(
                f"messages[{index}].content", "is required in a message without tool calls"
            )
        content = ""  # templates join it to other text
    elif not isinstance(content, str):
        content = "\n".join(part.text for part in content)
    made: dict[str, Any] = {"role": _ROLES[type(message)], "content": content}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name, None)) is not None:
            made[name] = value
    if calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": arguments_of(
                        f"messages[{index}].tool_calls[{i}].function.arguments",
                        call.function.arguments,
                    ),
                },
            }
            for i, call in enumerate(calls)
        ]
    return made


def arguments_of(field: str, written: str) -> Any:
    """Return a call's arguments as an object, because templates write them as JSON themselves.
    Raises ApiError.
    """
    try:
        return msgspec.json.decode(written or "{}")
    except (msgspec.DecodeError, RecursionError):
        raise refused(field, "is not valid JSON") from None


def tool_use_of(request: ChatRequest) -> ToolUse | None:
    """Return the tools that the request offers the model, and how it may call them; None without
    tools. Raises ApiError.
    """
    choice = request.tool_choice
    word, chosen = (
        (None, choice.function.name) if isinstance(choice, NamedToolChoice) else (choice, None)
    )
    return ToolUse.of(
        [tool.function for tool in request.tools or ()],
        word,
        chosen,
        request.parallel_tool_calls,
        "tool_choice.function.name",
    )
