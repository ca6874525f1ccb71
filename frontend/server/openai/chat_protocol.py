"""Request of /v1/chat/completions, and its messages as chat templates read them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from sidestep.frontend.input.template_files import Message
from sidestep.frontend.server.openai.prompt import Effort
from sidestep.frontend.server.openai.tool_use import FunctionTool, ToolChoiceWord, ToolUse
from sidestep.frontend.server.schemas.fields import Count, NumLogprobs, SamplingFields
from sidestep.frontend.server.transport.errors import refused


class TextPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Part of a message. Text is the only kind."""

    type: Literal["text"]
    text: str


Text = str | list[TextPart]


class SystemMessage(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="role", tag="system"
):
    """Message with the instructions for the model."""

    content: Text
    name: str | None = None


class DeveloperMessage(
    SystemMessage, kw_only=True, forbid_unknown_fields=True, tag_field="role", tag="developer"
):
    """System message under its newer name; chat templates get the role `system`."""


class UserMessage(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="role", tag="user"
):
    """Message of the user."""

    content: Text
    name: str | None = None


Nothing = Annotated[list[Any], msgspec.Meta(max_length=0)]


class PastCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Call that the model made in an earlier answer, as client libraries send it back."""

    id: str
    type: Literal["function"] = "function"
    function: PastFunction
    index: int | None = None
    """Index of the call in the message's list of calls, which has the same order."""
    provider_specific_fields: dict[str, Any] | None = None
    """Notes of a client library about the answer that had this call.

    The prompt does not contain them."""


class PastFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Function of an earlier call, and its arguments."""

    name: str
    arguments: str
    """JSON, as the model wrote it."""
    parsed_arguments: Any = None
    """Arguments, as a client library parsed them."""
    provider_specific_fields: dict[str, Any] | None = None
    """See PastCall."""


class AssistantMessage(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="role", tag="assistant"
):
    """Earlier answer of the model.

    In answers of this server the last fields are empty, or repeat the answer.
    """

    content: Text | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[PastCall] | None = None
    refusal: str | None = None
    """Text of another model that refused to answer. It replaces a missing content."""
    parsed: Any = None
    """Content, as a client library parsed it."""
    annotations: Nothing | None = None
    audio: None = None
    function_call: None = None
    images: Nothing | None = None
    provider_specific_fields: dict[str, Any] | None = None
    """See PastCall."""


class ToolMessage(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="role", tag="tool"
):
    """Output of a call."""

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
"""Struct of a message -> its role in chat templates."""


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Tool that the model may use. Functions are the only kind."""

    type: Literal["function"]
    function: FunctionTool


class ChosenFunction(msgspec.Struct, forbid_unknown_fields=True):
    """Name of one of the tools."""

    name: str


class NamedToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Function that the model must call."""

    type: Literal["function"] = "function"
    function: ChosenFunction


class ChatRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """Body of a request to /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoiceWord | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """False: return only the first of the model's calls."""
    reasoning_effort: Effort | None = None
    """Effort that the model's template gets as its variable `reasoning_effort` or
    `enable_thinking`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables for the model's template, such as {"enable_thinking": false}."""
    add_generation_prompt: bool | None = None
    """Whether the prompt ends with the beginning of an answer; true if not given."""
    continue_final_message: bool | None = None
    """Continue the last message instead of beginning a new one."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds the model's special tokens to those that the template writes;
    false if not given."""
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
    """Return the limit on the answer's tokens, which has two names.

    Raises ApiError if both are given and differ.
    """
    new, old = request.max_completion_tokens, request.max_tokens
    if new is not None and old is not None and new != old:
        raise refused("max_tokens", f"is {old}, and max_completion_tokens, its new name, is {new}")
    return old if new is None else new


def num_logprobs_of(request: ChatRequest) -> int | None:
    """Return the number of most probable tokens per token; None without logprobs.

    Raises ApiError.
    """
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise refused("top_logprobs", "has a meaning only with logprobs: true")
    return None


def template_messages(messages: list[ChatMessage]) -> list[Message]:
    """Return the messages as chat templates of the Hugging Face hub read them.

    Raises ApiError, which names the field.
    """
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
    """Return the tools of the request, and how the model may call them; None without tools.

    Raises ApiError.
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
