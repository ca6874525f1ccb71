"""Fields of requests: each works, or is refused by its name; none is ignored."""

from __future__ import annotations

from typing import Any

import pytest

from sidestep.frontend.server.openai.chat_protocol import ChatRequest
from sidestep.frontend.server.openai.completions import CompletionRequest
from sidestep.frontend.server.responses.protocol import RESPONSES_NOT_YET, ResponsesRequest
from sidestep.frontend.server.schemas.fields import NOT_YET
from tests.server.live import LiveServer

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TEXT: dict[str, Any] = {"prompt": "hi", "max_tokens": 2}
ROUTES = {"/v1/chat/completions": (CHAT, ChatRequest), "/v1/completions": (TEXT, CompletionRequest)}
RESPONSES = "/v1/responses"
ALL: dict[str, tuple[dict[str, Any], Any, dict[str, tuple[Any, ...]]]] = {
    **{path: (body, request, NOT_YET) for path, (body, request) in ROUTES.items()},
    RESPONSES: ({"input": "hi", "max_output_tokens": 2}, ResponsesRequest, RESPONSES_NOT_YET),
}
NOT_WORKING = [
    (path, name)
    for path, (_, request, table) in ALL.items()
    for name in request.__struct_fields__
    if name in table
]


def refusal(
    server: LiveServer, path: str, body: dict[str, Any] | bytes, status: int = 400
) -> dict[str, Any]:
    answer = server.post(path, body)
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(("path", "name"), NOT_WORKING)
def test_a_field_that_does_nothing_yet_is_refused_by_name(
    path: str, name: str, fake: LiveServer
) -> None:
    body, _, table = ALL[path]
    for value in (2, True, "x", ["y"], {"type": "json_object"}):
        if not any(value == n and type(value) is type(n) for n in table[name]):
            error = refusal(fake, path, {**body, name: value})
            assert (error["param"], error["code"]) == (name, "unsupported_field")
            assert error["message"].startswith(f"{name}: ")


@pytest.mark.parametrize(("path", "name"), NOT_WORKING)
def test_its_neutral_values_are_taken(path: str, name: str, fake: LiveServer) -> None:
    body, _, table = ALL[path]
    for value in (None, *table[name]):
        answer = fake.post(path, {**body, name: value})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"nonsense": 1}, "nonsense"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"seed": -2}, "seed"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"priority": 2**40}, "priority"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
        ({"stream": True, "stream_options": {"hm": 1}}, "stream_options.hm"),
        ({"deadline_ms": 0}, "deadline_ms"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"cache_salt": ""}, "cache_salt"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"temperature_last": 1}, "temperature_last"),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_by_name(
    path: str, given: dict[str, Any], param: str, fake: LiveServer
) -> None:
    error = refusal(fake, path, {**ROUTES[path][0], **given})
    assert error["param"] == param and error["message"].startswith(param), error


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "wizard", "content": "a"}], "messages[0].role"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0].type",
        ),
        ([{"role": "user", "content": "a", "mood": "good"}], "messages[0].mood"),
        (
            [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}],
                }
            ],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
    ids=str,
)
def test_wrong_messages_are_refused_by_name(messages: Any, param: str, fake: LiveServer) -> None:
    assert refusal(fake, "/v1/chat/completions", {"messages": messages})["param"] == param


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"max_completion_tokens": 3}, "max_tokens"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ],
    ids=str,
)
def test_what_only_chats_have_is_refused_by_name(
    given: dict[str, Any], param: str, fake: LiveServer
) -> None:
    assert refusal(fake, "/v1/chat/completions", {**CHAT, **given})["param"] == param


@pytest.mark.parametrize(
    "prompt", [[], "", [[]], ["a", 1], [1, [2]], [-1], [[10**6]], [10**6], 5, {"a": 1}], ids=str
)
def test_a_prompt_that_is_none_is_refused(prompt: Any, fake: LiveServer) -> None:
    error = refusal(fake, "/v1/completions", {"prompt": prompt})
    assert error["message"].startswith("prompt"), error


def test_more_choices_than_may_be_are_refused(fake: LiveServer) -> None:
    assert refusal(fake, "/v1/completions", {"prompt": ["a"] * 9, "n": 128})["param"] == "prompt"


@pytest.mark.parametrize("path", [*ALL, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b'{"prompt": "\\ud800"}',
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b'{"prompt": NaN}',
    ],
    ids=lambda body: f"{body[:12]!r}",
)
def test_what_is_no_request_is_refused(path: str, body: bytes, fake: LiveServer) -> None:
    refusal(fake, path, body)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}, "prompt"),
        (
            "/tokenize",
            {"messages": CHAT["messages"], "add_special_tokens": True},
            "add_special_tokens",
        ),
        ("/tokenize", {"prompt": "a", "chat_template_kwargs": {}}, "chat_template_kwargs"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
    ids=str,
)
def test_the_tokenizer_s_routes_refuse_by_name(
    path: str, body: dict[str, Any], param: str, fake: LiveServer
) -> None:
    assert refusal(fake, path, body)["param"] == param


def test_token_strings_are_given_where_asked_for(fake: LiveServer) -> None:
    made = fake.post("/tokenize", {"prompt": "hi", "return_token_strs": True}).json()
    assert made["token_strs"] == ["h", "i"] and made["count"] == 2 and made["max_model_len"] == 2048


def test_unknown_paths_and_methods_are_refused_in_the_same_shape(fake: LiveServer) -> None:
    assert "/v2" in refusal(fake, "/v2", {}, 404)["message"]
    assert "POST" in refusal(fake, "/health", {}, 405)["message"]
    assert refusal(fake, "/v1/models", {}, 405)


def test_a_body_that_does_not_say_it_is_json_is_refused(fake: LiveServer) -> None:
    answer = fake.post("/v1/completions", TEXT, **{"content-type": "text/plain"})
    assert answer.status_code == 415 and "application/json" in answer.json()["error"]["message"]
