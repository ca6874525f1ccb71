"""The request and the answer of /v1/responses, of which text is served: no tools, nothing stored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from sidestep.frontend.server.fields import Count, Natural, NumLogprobs, Penalty
from sidestep.frontend.server.protocol import ContentLogprob, PromptDetails
from sidestep.frontend.server.structure import TextConfigFormat, TextFormat
from sidestep.ipc.sampling_params import MAX_SEED

RESPONSES_NOT_YET: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "logprobs": (False,),
    "max_tool_calls": (),
    "metadata": ({},),
    "parallel_tool_calls": (True,),
    "previous_response_id": (),
    "prompt": (),
    "prompt_cache_key": (),
    "reasoning": ({},),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "stream_options": (),
    "tool_choice": ("auto", "none"),
    "tools": ([],),
    "truncation": ("disabled",),
    "user": (),
}
"""As fields.NOT_YET, for this request."""


class InputText(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="input_text"):
    """Text of a message; text is the only kind there is."""

    text: str


class OutputText(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="output_text"):
    """Text of an answer, also where it comes back in the next request's input."""

    text: str
    annotations: Annotated[list[Any], msgspec.Meta(max_length=0)] = []
    logprobs: list[ContentLogprob] | None = []


class InputMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A message, or an answer's as it was given: its id and status name it and say nothing more."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputText | OutputText]
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    """What the text must be."""

    format: TextConfigFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request to /v1/responses."""

    model: str | None = None
    input: Annotated[str, msgspec.Meta(min_length=1)] | Annotated[list[InputMessage], msgspec.Meta(min_length=1)]
    instructions: str | None = None
    """The system's message."""
    max_output_tokens: Count | None = None
    stream: bool | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    # As in /v1/chat/completions.
    seed: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEED)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    min_tokens: Natural | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31) + 1, le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    deadline_ms: Count | None = None
    text: TextConfig | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: NumLogprobs | None = None
    """Of each token; asks for logprobs by itself, too."""
    # Not implemented: see RESPONSES_NOT_YET.
    background: Any = None
    conversation: Any = None
    logprobs: Any = None
    max_tool_calls: Any = None
    metadata: Any = None
    parallel_tool_calls: Any = None
    previous_response_id: Any = None
    prompt: Any = None
    prompt_cache_key: Any = None
    reasoning: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    stream_options: Any = None
    tool_choice: Any = None
    tools: Any = None
    truncation: Any = None
    user: Any = None


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """Text that led to the answer."""

    text: str


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """The answer."""

    id: str
    status: str
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """What led to it."""

    id: str
    status: str
    summary: list[Any] = []
    content: list[ReasoningText]


Item = MessageItem | ReasoningItem


class OutputDetails(msgspec.Struct):
    """More on the output's tokens."""

    reasoning_tokens: int = 0


class ResponsesUsage(msgspec.Struct, kw_only=True):
    """Counts of tokens."""

    input_tokens: int
    input_tokens_details: PromptDetails
    output_tokens: int
    output_tokens_details: OutputDetails = msgspec.field(default_factory=OutputDetails)
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    """Why an answer is not whole."""

    reason: str
    """'max_output_tokens', 'deadline', or 'abort' when the server shuts down."""


class ResponsesAnswer(msgspec.Struct, kw_only=True):
    """The answer, and the state of it in a stream's events."""

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
    store: bool = False
    text: TextConfig = msgspec.field(default_factory=lambda: TextConfig(TextFormat()))
    tool_choice: str = "auto"
    tools: list[Any] = []
    top_logprobs: int = 0
    truncation: str = "disabled"
