"""Answers of the server, as msgspec structs.

Answers are encoded from these structs, and the OpenAPI document is made from them. A stream of
tokens does not make a struct for each token; see openai/encoding.py.
"""

from __future__ import annotations

from typing import Literal

import msgspec

FinishWord = Literal["stop", "length", "tool_calls", "repetition", "abort"]
"""Reason why a choice has ended.

'repetition': see repetition_detection. 'abort': the deadline has passed, or the server shuts down;
`stop_reason` says which."""


class TokenLogprob(msgspec.Struct):
    """Log-probability of a token."""

    token: str
    """Text of the token, with a replacement character for bytes of an incomplete character."""
    logprob: float
    bytes: list[int]
    """Bytes of the token, in UTF-8."""


class ContentLogprob(TokenLogprob):
    """Log-probability of a token of the answer, and of its alternatives."""

    top_logprobs: list[TokenLogprob]
    """Most probable tokens at its position, best first."""


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of all tokens of a chat's answer, with its reasoning and its tool calls."""

    content: list[ContentLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities of a completion's tokens, and with echo of its prompt's tokens.

    They are null for the first token of a prompt, because no token comes before it.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Character of the text at which each token begins."""


class PromptLogprob(msgspec.Struct):
    """Log-probability of a token of the prompt."""

    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""One mapping from token ids for each token of a prompt; null for the first token."""


class PromptDetails(msgspec.Struct):
    """Further counts of the prompt's tokens."""

    cached_tokens: int


class CompletionDetails(msgspec.Struct):
    """Counts of the drafts of an answer's tokens, by OpenAI's names for predicted tokens."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(msgspec.Struct):
    """Number of tokens of all choices together; the prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | msgspec.UnsetType = msgspec.UNSET
    """With speculation: the drafts of the choices that the engine has ended."""


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    """Function that the model calls, and its arguments."""

    name: str
    arguments: str
    """JSON, as the model wrote it."""


class ToolCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One call of a function, in an answer and in the messages of later requests."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AnswerMessage(msgspec.Struct, kw_only=True):
    """Message of the model."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One choice of an answer to a chat."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishWord
    stop_reason: int | str | None = None
    """The stop token's id or the stop text, or 'deadline'."""
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Answer to /v1/chat/completions."""

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
    """New parts of one call; the call's first delta has its id and name."""

    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionDelta


class Delta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """New parts of an answer."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """New parts of one choice."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishWord | None = None
    stop_reason: int | str | None | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """Token ids of the prompt, in the choice's first event, if the request asks for them."""
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """Token ids since the previous event."""


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None | msgspec.UnsetType = msgspec.UNSET


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One completion, or the new part of it in an event of a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishWord | None = None
    stop_reason: int | str | None | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct, kw_only=True):
    """Answer to /v1/completions, and one event of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None | msgspec.UnsetType = msgspec.UNSET


class Model(msgspec.Struct, kw_only=True):
    """Model that requests can name."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "sidestep"
    root: str
    max_model_len: int
    """Longest prompt plus output, in tokens."""


class ModelList(msgspec.Struct, kw_only=True):
    """Answer to /v1/models."""

    object: Literal["list"] = "list"
    data: list[Model]


class Tokens(msgspec.Struct, kw_only=True):
    """Answer to /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(msgspec.Struct):
    """Answer to /detokenize."""

    prompt: str


class Status(msgspec.Struct, omit_defaults=True):
    """Answer to /health and /ready."""

    status: str
    """'degraded' while some replicas serve and others are dead or stalled; 'restarting' while a
    replica is being started again and none is dead or stalled."""
    dead_replicas: dict[str, str] = {}
    """Number of each dead replica -> its cause of death."""
    stalled_replicas: dict[str, str] = {}
    """Number of each stalled replica -> the cause of the stall."""
    restarting_replicas: dict[str, str] = {}
    """Number of each replica that is being started again -> the cause of its death."""
    hosts: dict[str, list[int]] = {}
    """Name of each other host that has joined -> the replicas that it has, or has ranks of."""


class Version(msgspec.Struct):
    """Answer to /version."""

    version: str


class Load(msgspec.Struct):
    """Answer to /v1/load: the load of the engine, for routers of requests."""

    num_running: int
    """Number of requests that the engine computes."""
    num_waiting: int
    """Number of requests that wait for the engine."""
    num_connected: int
    """Number of requests of this server whose clients wait for an answer."""
    kv_cache_usage: float
    """Share of the KV cache that is held, from 0 to 1."""
