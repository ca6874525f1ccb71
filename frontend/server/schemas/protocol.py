"""The answers of the server, as msgspec structs: what is sent is encoded from them, and the OpenAPI
document is made from them. Streams of tokens do not make one for each token; see sse.py.
"""

from __future__ import annotations

from typing import Literal

import msgspec

FinishWord = Literal["stop", "length", "tool_calls", "repetition", "abort"]
"""'repetition': see repetition_detection; 'abort': the deadline has passed, or the server shuts
down; `stop_reason` has more."""


class TokenLogprob(msgspec.Struct):
    """A token and how probable the model found it."""

    token: str
    """A replacement character stands for bytes that are no character by themselves."""
    logprob: float
    bytes: list[int]
    """UTF-8."""


class ContentLogprob(TokenLogprob):
    """The same of a token of the answer."""

    top_logprobs: list[TokenLogprob]
    """The most probable tokens in its place, best first."""


class ChatLogprobs(msgspec.Struct):
    """Of a chat's answer, all its tokens, those of reasoning and of tool calls too."""

    content: list[ContentLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """Of a completion's tokens, and of its prompt's where that is repeated; null where nothing
    comes before.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Where each begins, in characters of the text."""


class PromptLogprob(msgspec.Struct):
    """How probable the model found a token of the prompt."""

    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""For each token of a prompt, by token id; null for the first."""


class PromptDetails(msgspec.Struct):
    """More on the prompt's tokens."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Tokens of all choices together; the prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    """What the model wants called."""

    name: str
    arguments: str
    """JSON, as the model has written it."""


class ToolCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One call, in an answer and in the messages that follow it."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AnswerMessage(msgspec.Struct, kw_only=True):
    """What the model says."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishWord
    stop_reason: int | str | None = None
    """The stop token's id or the stop text, or 'deadline'."""
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The answer to /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    """New text of a call."""

    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is new of one call; id and name come first, with the call's first delta."""

    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionDelta


class Delta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is new of an answer."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """What is new of one choice."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishWord | None = None
    stop_reason: int | str | None | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """The prompt's token ids, in the choice's first event, if the request asks for them."""
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """Token ids since the event before."""


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None | msgspec.UnsetType = msgspec.UNSET


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One completion, or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishWord | None = None
    stop_reason: int | str | None | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct, kw_only=True):
    """The answer to /v1/completions, and one event of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None | msgspec.UnsetType = msgspec.UNSET


class Model(msgspec.Struct, kw_only=True):
    """A model that can be asked for."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "sidestep"
    root: str
    max_model_len: int
    """Longest prompt plus output, in tokens."""


class ModelList(msgspec.Struct, kw_only=True):
    """The answer to /v1/models."""

    object: Literal["list"] = "list"
    data: list[Model]


class Tokens(msgspec.Struct, kw_only=True):
    """The answer to /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(msgspec.Struct):
    """The answer to /detokenize."""

    prompt: str


class Status(msgspec.Struct, omit_defaults=True):
    """The answer to /health and /ready."""

    status: str
    """'degraded' while some replicas serve and others are dead or stalled."""
    dead_replicas: dict[str, str] = {}
    """The cause of death of each dead replica, by its number."""
    stalled_replicas: dict[str, str] = {}
    """The cause of each stall, by the replica's number."""


class Version(msgspec.Struct):
    """The answer to /version."""

    version: str


class Load(msgspec.Struct):
    """The answer to /v1/load: what a router of requests wants to know."""

    num_running: int
    """Requests that the engine computes."""
    num_waiting: int
    """Requests that wait for it."""
    num_connected: int
    """Requests of this server whose clients wait for an answer."""
    kv_cache_usage: float
    """Share of the KV cache that is held, from 0 to 1."""
