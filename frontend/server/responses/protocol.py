"""Request and answer of /v1/responses. The route serves text and functions, and stores nothing."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from sidestep.frontend.server.openai.prompt import Effort
from sidestep.frontend.server.openai.tool_use import FunctionTool, ToolChoiceWord
from sidestep.frontend.server.schemas.fields import (
    ClientFields,
    Count,
    MinP,
    Natural,
    NumLogprobs,
    Penalty,
    Seed,
    Temperature,
    TopK,
    TopP,
)
from sidestep.frontend.server.schemas.protocol import ContentLogprob, PromptDetails
from sidestep.frontend.server.schemas.structure import TextConfigFormat, TextFormat

RESPONSES_NOT_YET: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "logprobs": (False,),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "prompt_cache_retention": ("in_memory",),
    "service_tier": ("auto", "default"),
    "stream_options": ({"include_obfuscation": False},),
    "truncation": ("disabled",),
}
"""Known field of this request that is not implemented -> its neutral values, besides null."""


class InputText(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="input_text"
):
    """Text of a message. Text is the only kind of content."""

    text: str


class OutputText(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="output_text"
):
    """Text of an answer, also where it comes back in the next request's input."""

    text: str
    annotations: Annotated[list[Any], msgspec.Meta(max_length=0)] = []
    logprobs: list[ContentLogprob] | None = []


class GivenOutputText(
    OutputText, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="output_text"
):
    """Text of an earlier answer, in an input."""

    parsed: Any = None
    """Text, as a client library parsed it."""


class RefusalText(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="refusal"
):
    """Text of another model that refused to answer."""

    refusal: str


class ReasoningText(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="reasoning_text"
):
    """Text of the reasoning before an answer."""

    text: str


class InputItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Message, item of an earlier answer, or output of a call. Its id and status are not used."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    id: str | None = None
    status: str | None = None
    # Fields of a message; reasoning has content too.
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputText | GivenOutputText | RefusalText | ReasoningText] | None = None
    # Fields of a call and of its output.
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    parsed_arguments: Any = None
    """Arguments, as a client library parsed them."""
    output: str | list[InputText] | None = None
    # Fields of reasoning.
    summary: Annotated[list[Any], msgspec.Meta(max_length=0)] | None = None


class FlatFunctionTool(FunctionTool, kw_only=True, forbid_unknown_fields=True):
    """Tool in the form of this route. Functions are the only kind."""

    type: Literal["function"]


class FlatToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Function that the model must call."""

    type: Literal["function"]
    name: str


class ReasoningOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of the model's reasoning."""

    effort: Effort | None = None
    """See reasoning_effort of /v1/chat/completions."""
    # Not implemented: only null is accepted.
    summary: Any = None
    generate_summary: Any = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    """Form of the answer's text."""

    format: TextConfigFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesRequest(ClientFields, kw_only=True, forbid_unknown_fields=True):
    """Body of a request to /v1/responses."""

    input: (
        Annotated[str, msgspec.Meta(min_length=1)]
        | Annotated[list[InputItem], msgspec.Meta(min_length=1)]
    )
    instructions: str | None = None
    """System message."""
    max_output_tokens: Count | None = None
    tools: list[FlatFunctionTool] | None = None
    tool_choice: ToolChoiceWord | FlatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """False: return only the first of the model's calls."""
    reasoning: ReasoningOptions | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    # As in /v1/chat/completions.
    seed: Seed | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    temperature_last: bool | None = None
    min_tokens: Natural | None = None
    ignore_eos: bool | None = None
    text: TextConfig | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: NumLogprobs | None = None
    """Number of most probable tokens per token. A number above 0 asks for logprobs by itself."""
    # Not implemented: see RESPONSES_NOT_YET.
    background: Any = None
    conversation: Any = None
    logprobs: Any = None
    max_tool_calls: Any = None
    previous_response_id: Any = None
    prompt: Any = None
    stream_options: Any = None
    truncation: Any = None


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """Item with the text of the answer."""

    id: str
    status: str
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """Item with the reasoning before the answer."""

    id: str
    status: str
    summary: list[Any] = []
    content: list[ReasoningText]


class CallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """Item with a call that the model makes."""

    id: str
    call_id: str
    """Id of the call, which the item with the call's output repeats."""
    name: str
    arguments: str
    """JSON, as the model wrote it."""
    status: str


Item = MessageItem | ReasoningItem | CallItem


class OutputDetails(msgspec.Struct):
    """Further counts of the output's tokens."""

    reasoning_tokens: int = 0


class ResponsesUsage(msgspec.Struct, kw_only=True):
    """Number of tokens of a request and of its answer."""

    input_tokens: int
    input_tokens_details: PromptDetails
    output_tokens: int
    output_tokens_details: OutputDetails = msgspec.field(default_factory=OutputDetails)
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    """Reason why an answer is incomplete."""

    reason: str
    """'max_output_tokens', 'deadline', or 'abort' when the server shuts down."""


class ResponsesAnswer(msgspec.Struct, kw_only=True):
    """Answer to /v1/responses, and its state in the events of a stream."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete"]
    output: list[Item] = []
    usage: ResponsesUsage | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float
    top_p: float
    error: None = None
    metadata: dict[str, str] = {}
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    prompt_cache_key: str | None = None
    reasoning: ReasoningOptions | None = None
    safety_identifier: str | None = None
    store: bool = False
    text: TextConfig = msgspec.field(default_factory=lambda: TextConfig(TextFormat()))
    tool_choice: ToolChoiceWord | FlatToolChoice = "auto"
    tools: list[FlatFunctionTool] = []
    top_logprobs: int = 0
    truncation: str = "disabled"
    user: str | None = None
