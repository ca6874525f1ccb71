"""Make the OpenAPI document from the structs of requests and answers.

Requests are decoded into these structs, and answers are encoded from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sidestep.frontend.server.openai.chat_protocol import ChatRequest
from sidestep.frontend.server.openai.completions import CompletionRequest
from sidestep.frontend.server.openai.tokens import DetokenizeRequest, TokenizeRequest
from sidestep.frontend.server.operation.control import Memory, Profile, Sleeping
from sidestep.frontend.server.operation.flight import Flight
from sidestep.frontend.server.pooling.protocol import (
    ClassificationList,
    ClassifyRequest,
    EmbeddingList,
    EmbeddingRequest,
    PooledList,
    PoolingRequest,
    Ranking,
    RerankRequest,
    ScoreList,
    ScoreRequest,
)
from sidestep.frontend.server.responses.protocol import (
    RESPONSES_NOT_YET,
    ResponsesAnswer,
    ResponsesRequest,
)
from sidestep.frontend.server.schemas.fields import NOT_YET, refusal_of
from sidestep.frontend.server.schemas.protocol import (
    ChatChunk,
    ChatCompletion,
    Completion,
    Load,
    Model,
    ModelList,
    Status,
    Text,
    Tokens,
    Version,
)
from sidestep.frontend.server.service.service import DEADLINE_HEADER
from sidestep.frontend.server.transport.errors import ErrorBody


@dataclass(frozen=True)
class Operation:
    """One route, as the document describes it."""

    path: str
    summary: str
    answer: type | None
    """Struct of the answer; None for plain text."""
    request: type | None = None
    event: type | None = None
    """Struct of each event of a stream; None if the route does not stream."""
    more_statuses: tuple[str, ...] = ()
    open: bool = False
    """Whether the route needs no key."""
    is_command: bool = False
    """Whether the route takes a POST without a body, and an operator's key."""
    query: Mapping[str, Any] = field(default_factory=dict)
    """Name -> schema of each parameter in the URL."""


_OF_COMMANDS = ("400", "409")
_OF_VECTORS = (EmbeddingRequest, RerankRequest, ScoreRequest, ClassifyRequest, PoolingRequest)
OPERATIONS = (
    Operation(
        "/v1/chat/completions",
        "Answer a conversation.",
        ChatCompletion,
        ChatRequest,
        ChatChunk,
        ("429",),
    ),
    Operation(
        "/v1/completions", "Complete prompts.", Completion, CompletionRequest, Completion, ("429",)
    ),
    Operation(
        "/v1/responses", "Answer, item by item.", ResponsesAnswer, ResponsesRequest, dict, ("429",)
    ),
    Operation(
        "/v1/embeddings", "Make embeddings.", EmbeddingList, EmbeddingRequest, None, ("429",)
    ),
    *(
        Operation(path, "Sort documents by relevance.", Ranking, RerankRequest, None, ("429",))
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    ),
    *(
        Operation(path, "Score pairs of texts.", ScoreList, ScoreRequest, None, ("429",))
        for path in ("/v1/score", "/score")
    ),
    Operation(
        "/classify", "Classify prompts.", ClassificationList, ClassifyRequest, None, ("429",)
    ),
    Operation("/pooling", "Make vectors.", PooledList, PoolingRequest, None, ("429",)),
    Operation("/tokenize", "Text or messages to token ids.", Tokens, TokenizeRequest),
    Operation("/detokenize", "Token ids to text.", Text, DetokenizeRequest),
    Operation("/v1/models", "The model, under all its names.", ModelList),
    Operation(
        "/v1/models/{model}", "The model under one of its names.", Model, more_statuses=("404",)
    ),
    Operation("/v1/load", "How busy the engine is.", Load),
    Operation(
        "/v1/flight",
        "The engine's last steps, and the requests that have not ended.",
        Flight,
        more_statuses=("400",),
        query={
            "since": {"type": "integer", "minimum": 0, "maximum": 10**18 - 1},
            "replica": {"type": "integer", "minimum": 0},
        },
    ),
    Operation(
        "/start_profile",
        "Begin to record what the workers do.",
        dict,
        is_command=True,
        more_statuses=_OF_COMMANDS,
    ),
    Operation(
        "/stop_profile",
        "End the recording, and write it to files.",
        Profile,
        is_command=True,
        more_statuses=_OF_COMMANDS,
    ),
    Operation("/memory_use", "The memory of each worker.", Memory, more_statuses=_OF_COMMANDS),
    Operation(
        "/sleep",
        "Free the memory of the KV cache and of the weights.",
        dict,
        is_command=True,
        more_statuses=_OF_COMMANDS,
        query={"level": {"type": "integer", "minimum": 1, "maximum": 2}},
    ),
    Operation("/wake_up", "End a sleep.", dict, is_command=True, more_statuses=_OF_COMMANDS),
    Operation("/is_sleeping", "Whether the engine sleeps.", Sleeping, more_statuses=("400",)),
    Operation("/health", "Whether the engine makes progress.", Status, open=True),
    Operation("/ready", "Whether new requests are taken.", Status, open=True),
    Operation("/version", "The server's version.", Version),
    Operation("/metrics", "Counts for Prometheus.", None),
    Operation("/openapi.json", "This document.", dict),
)
_STATUSES = {
    "400": "A field or parameter is wrong; it is named.",
    "401": "No key, or a wrong one.",
    "403": "A page of another origin, or a route that needs an operator's key.",
    "404": "No such model.",
    "408": "The body has not come in time.",
    "409": "The workers have refused it, or have not answered in time.",
    "413": "The body is too large.",
    "415": "The body is not application/json.",
    "429": "Too much waits already.",
    "500": "The request failed inside the engine.",
    "503": "The engine is dead or stalled, or the server shuts down.",
}
_OF_GETS = ("401", "403", "500", "503")
_OF_POSTS = ("400", "401", "403", "404", "408", "413", "415", "500", "503")
_REF = "#/components/schemas/{name}"


def make_document(version: str) -> dict[str, Any]:
    """Return the document for this version of the server."""
    used: list[Any] = [ErrorBody]
    for operation in OPERATIONS:
        used += [
            t
            for t in (operation.answer, operation.request, operation.event)
            if t not in (None, dict)
        ]
    unique = list(dict.fromkeys(used))
    refs, schemas = msgspec.json.schema_components(unique, ref_template=_REF)
    by_type: dict[Any, Any] = dict(zip(unique, refs, strict=True))
    _add_neutral_values(schemas)
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        method = "post" if operation.request is not None or operation.is_command else "get"
        paths[operation.path] = {method: _operation(operation, by_type)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Sidestep", "version": version},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(operation: Operation, by_type: dict[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = (
        {"text/plain": {"schema": {"type": "string"}}}
        if operation.answer is None
        else {"application/json": {"schema": by_type.get(operation.answer, {"type": "object"})}}
    )
    if operation.event is not None:
        data = by_type.get(operation.event, {"type": "object"})
        content["text/event-stream"] = {
            "schema": {
                "description": "Each event; the data of the last is [DONE].",
                "type": "object",
                "required": ["data"],
                "properties": {
                    "data": {
                        "type": "string",
                        "anyOf": [
                            {"const": "[DONE]"},
                            {"contentMediaType": "application/json", "contentSchema": data},
                        ],
                    }
                },
            }
        }
    error = {"application/json": {"schema": by_type[ErrorBody]}}
    statuses = (*(_OF_GETS if operation.request is None else _OF_POSTS), *operation.more_statuses)
    made: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {
            "200": {"description": "Success.", "content": content},
            **{s: {"description": _STATUSES[s], "content": error} for s in sorted(statuses)},
        },
        # The empty object allows requests without a key, for servers that have no keys.
        "security": []
        if operation.open
        else [{"key": []}]
        if operation.is_command
        else [{}, {"key": []}],
    }
    if operation.query:
        made["parameters"] = [
            {"name": name, "in": "query", "schema": schema}
            for name, schema in operation.query.items()
        ]
    if "{model}" in operation.path:
        made["parameters"] = [
            {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    if operation.request is not None:
        made["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": by_type[operation.request]}},
        }
    if operation.event is not None or operation.request in _OF_VECTORS:
        made["parameters"] = [
            {
                "name": DEADLINE_HEADER,
                "in": "header",
                "schema": {"type": "integer", "minimum": 1, "maximum": 2**31 - 1},
                "description": "Milliseconds after which the request ends with what it has.",
            }
        ]
    return made


def _add_neutral_values(schemas: dict[str, Any]) -> None:
    """Restrict the fields that are not implemented to their neutral values."""
    for request, table in (
        (ChatRequest, NOT_YET),
        (CompletionRequest, NOT_YET),
        (ResponsesRequest, RESPONSES_NOT_YET),
        *((request, NOT_YET) for request in _OF_VECTORS),
    ):
        properties = schemas[request.__name__]["properties"]
        for name, neutral in table.items():
            if name in properties:
                properties[name] = {
                    "enum": [None, *neutral],
                    "default": None,
                    "description": refusal_of(name),
                }
        if "logit_bias" in properties:
            properties["logit_bias"]["anyOf"][0]["propertyNames"] = {"pattern": "^[0-9]+$"}
    for name in ("summary", "generate_summary"):
        schemas["ReasoningOptions"]["properties"][name] = {"enum": [None], "default": None}
    schemas["StreamOptions"]["properties"]["include_obfuscation"] = {
        "enum": [None, False],
        "default": None,
    }


class OpenApiRoute:
    """Route that serves the document."""

    def __init__(self, version: str) -> None:
        self._body = msgspec.json.encode(make_document(version))

    async def __call__(self, http: Request) -> Response:
        """Return the document as JSON."""
        return Response(self._body, media_type="application/json")
