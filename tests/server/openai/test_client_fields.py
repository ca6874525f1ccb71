"""Fields that clients send by habit.

The server accepts them, obeys them, or refuses them by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.live import LiveServer
from tests.server.openai.test_fields import ALL, refusal
from tests.server.scripted import scripted_server

CHAT = "/v1/chat/completions"
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
NOTES: dict[str, Any] = {
    "user": "me",
    "metadata": {"job": "7"},
    "prompt_cache_key": "k",
    "safety_identifier": "s",
    "store": True,
}
DUMPED: dict[str, Any] = {
    "role": "assistant",
    "content": "Hello.",
    "refusal": None,
    "annotations": None,
    "audio": None,
    "function_call": None,
    "tool_calls": None,
    "provider_specific_fields": {"refusal": None},
    "images": [],
}


@pytest.mark.parametrize("path", ALL)
def test_fields_that_ask_nothing_of_the_model_are_taken(path: str, fake: LiveServer) -> None:
    body = ALL[path][0]
    answer = fake.post(path, {**body, **NOTES, "seed": -1})
    assert answer.status_code == 200, answer.text
    if path == "/v1/responses":
        made = answer.json()
        assert made["store"] is False
        assert {name: made[name] for name in NOTES if name != "store"} == {
            name: value for name, value in NOTES.items() if name != "store"
        }


@pytest.mark.parametrize("path", ALL)
@pytest.mark.parametrize(
    "given",
    [
        {"user": 5},
        {"metadata": {"a": 1}},
        {"metadata": {"k" * 65: "v"}},
        {"metadata": {str(i): "" for i in range(17)}},
        {"user": "x" * 513},
        {"store": "yes"},
    ],
    ids=lambda given: next(iter(given)),
)
def test_notes_that_are_none_are_refused(
    path: str, given: dict[str, Any], fake: LiveServer
) -> None:
    assert refusal(fake, path, {**ALL[path][0], **given})["param"].startswith(next(iter(given)))


@pytest.mark.parametrize("path", ALL)
def test_unknown_nulls_are_ignored_and_whole_numbers_may_be_floats(
    path: str, fake: LiveServer
) -> None:
    body = ALL[path][0]
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    answer = fake.post(path, {**body, limit: 3.0, "mood": None, "ignore_eos": True})
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    assert (usage.get("completion_tokens") or usage.get("output_tokens")) == 3
    assert refusal(fake, path, {**body, limit: 3.5})["param"] == limit
    assert refusal(fake, path, {**body, "mood": "good", "weight": None})["param"] == "mood"


def test_nulls_in_a_schema_stay(fake: LiveServer) -> None:
    """The second reading of a body must not change what the client's schema says."""
    schema = {"const": None, "default": 1.0}
    answer = fake.post(
        CHAT,
        {
            "messages": HI,
            "mood": None,
            "max_tokens": 8,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "nothing", "schema": schema},
            },
        },
    )
    assert answer.json()["choices"][0]["message"]["content"] == "null", answer.text


async def test_messages_of_client_libraries_reach_the_template(fake_model: str) -> None:
    async with scripted_server(fake_model, tool_call_parser="hermes") as (engine, client):
        engine.says = "ok"
        call = {
            "id": "1",
            "type": "function",
            "index": 0,
            "function": {
                "name": "f",
                "arguments": '{"city": "Bern"}',
                "parsed_arguments": {"city": "Bern"},
            },
        }
        messages: Any = [
            *HI,
            DUMPED,
            *HI,
            {**DUMPED, "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "name": "f", "content": "wet"},
            {"role": "assistant", "content": None, "refusal": "No."},
            *HI,
        ]
        await client.chat.completions.create(model="scripted", messages=messages)
        assert engine.prompts() == [
            "<user>hi<assistant>Hello.<user>hi<assistant>[f Bern]<tool>wet<assistant>No."
            "<user>hi<assistant>"
        ]


@pytest.mark.parametrize("begin", [{}, {"add_generation_prompt": False}], ids=str)
async def test_an_answer_can_be_gone_on_with(begin: dict[str, Any], fake_model: str) -> None:
    async with scripted_server(fake_model) as (engine, client):
        engine.says = " you?"
        said: Any = [*HI, {"role": "assistant", "content": "How are "}]
        await client.chat.completions.create(
            model="scripted", messages=said, extra_body={"continue_final_message": True, **begin}
        )
        await client.chat.completions.create(
            model="scripted", messages=said, extra_body={"add_generation_prompt": False}
        )
        assert engine.prompts() == ["<user>hi<assistant>How are ", "<user>hi<assistant>How are "]


@pytest.mark.parametrize(
    ("messages", "given"),
    [
        (HI, {"add_generation_prompt": True}),
        ([*HI, {"role": "assistant", "content": ""}], {}),
        (
            [
                *HI,
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": ""}}],
                },
            ],
            {},
        ),
    ],
    ids=["generation prompt", "empty", "calls"],
)
def test_what_cannot_be_gone_on_with_is_refused(
    messages: Any, given: dict[str, Any], fake: LiveServer
) -> None:
    body = {"messages": messages, "continue_final_message": True, **given}
    assert refusal(fake, CHAT, body)["param"] == "continue_final_message"


@pytest.mark.parametrize(
    ("template", "given", "prompt"),
    [
        ("{{ reasoning_effort }}", {"reasoning_effort": "low"}, "low"),
        ("{{ enable_thinking }}", {"reasoning_effort": "none"}, "False"),
        ("{{ enable_thinking }}", {"reasoning_effort": "high"}, "True"),
        (
            "{{ enable_thinking }}",
            {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": 5}},
            "5",
        ),
        ("plain", {"reasoning_effort": "none"}, "plain"),
        ("plain", {"reasoning_effort": "low"}, None),
    ],
    ids=str,
)
async def test_reasoning_effort_is_the_template_s(
    template: str, given: dict[str, Any], prompt: str | None, fake_model: str, tmp_path: Any
) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / file).symlink_to(f"{fake_model}/{file}")
    (tmp_path / "chat_template.jinja").write_text(template)
    async with scripted_server(str(tmp_path)) as (engine, client):
        engine.says = "ok"
        answer = (
            await client.post(
                "/chat/completions", body={"messages": HI, **given}, cast_to=dict[str, Any]
            )
            if prompt is not None
            else None
        )
        if answer is None:
            with pytest.raises(
                Exception, match="reasoning_effort: this model's chat template has neither"
            ):
                await client.post(
                    "/chat/completions", body={"messages": HI, **given}, cast_to=dict[str, Any]
                )
        else:
            assert engine.prompts() == [prompt]


@pytest.mark.parametrize("path", ALL)
def test_a_priority_that_would_do_nothing_is_refused(path: str, fake: LiveServer) -> None:
    error = refusal(fake, path, {**ALL[path][0], "priority": 1})
    assert error["param"] == "priority" and "--scheduling-policy priority" in error["message"]
    assert fake.post(path, {**ALL[path][0], "priority": 0}).status_code == 200


def test_a_priority_is_taken_where_it_counts(make_server: Callable[..., LiveServer]) -> None:
    server = make_server("--scheduling-policy", "priority")
    assert (
        server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "priority": -5}).status_code
        == 200
    )


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a" * 3000}]}, "messages"),
        ("/v1/completions", {"prompt": "a" * 3000}, "prompt"),
        ("/v1/completions", {"prompt": [5] * 3000}, "prompt"),
        ("/v1/responses", {"input": "a" * 3000}, "input"),
    ],
    ids=["chat", "text", "ids", "response"],
)
def test_too_long_is_said_in_the_words_that_clients_know(
    path: str, body: Any, field: str, fake: LiveServer
) -> None:
    error = refusal(fake, path, body)
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")
    assert error["message"].startswith(
        f"This model's maximum context length is 2048 tokens. However, your {field} "
    )
    assert "prompt_token_ids" not in error["message"] and "max_model_len" not in error["message"]


def test_a_token_that_is_none_is_said_of_the_prompt(fake: LiveServer) -> None:
    assert refusal(fake, "/v1/completions", {"prompt": [10**6]})["param"] == "prompt"


def test_more_output_than_fits_is_cut_to_it(fake: LiveServer) -> None:
    made = fake.post(
        "/v1/completions", {"prompt": "a" * 2040, "max_tokens": 10**6, "ignore_eos": True}
    ).json()
    assert (
        made["usage"]["completion_tokens"] == 8 and made["choices"][0]["finish_reason"] == "length"
    )


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_can_be_had_alone(stream: bool, tiny: LiveServer) -> None:
    body = {
        "prompt": ["def f(", "import"],
        "max_tokens": 0,
        "echo": True,
        "logprobs": 1,
        "stream": stream,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    answer = tiny.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    texts, tokens, usage = {0: "", 1: ""}, {0: 0, 1: 0}, None
    for event in events(answer.text) if stream else [answer.json()]:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            tokens[choice["index"]] += len((choice["logprobs"] or {}).get("tokens", ()))
            assert choice["finish_reason"] in (None, "length")
    assert texts == {0: "def f(", 1: "import"} and usage is not None
    assert usage["prompt_tokens"] == usage["total_tokens"] == sum(tokens.values()) > 3
    assert usage["completion_tokens"] == 0
    assert (
        refusal(tiny, "/v1/completions", {"prompt": "hi", "max_tokens": 0})["param"] == "max_tokens"
    )


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_token_ids_are_given_where_asked_for(path: str, fake: LiveServer) -> None:
    body = {**ALL[path][0], "return_token_ids": True, "max_tokens": 5, "seed": 1, "n": 2}
    whole = fake.post(path, body).json()
    prompt = whole.get("prompt_token_ids") or whole["choices"][0]["prompt_token_ids"]
    assert len(prompt) == whole["usage"]["prompt_tokens"]
    streamed: dict[int, list[int]] = {0: [], 1: []}
    first: dict[int, list[int]] = {}
    for event in events(fake.post(path, {**body, "stream": True}).text):
        for choice in event["choices"]:
            streamed[choice["index"]] += choice.get("token_ids", [])
            if "prompt_token_ids" in choice:
                first[choice["index"]] = choice["prompt_token_ids"]
    assert streamed == {choice["index"]: choice["token_ids"] for choice in whole["choices"]}
    assert first == {0: prompt, 1: prompt}
    assert "token_ids" not in fake.post(path, ALL[path][0]).text


@pytest.mark.parametrize(
    ("name", "newer"),
    [
        ("guided_json", "structured_outputs"),
        ("guided_regex", "structured_outputs"),
        ("guided_choice", "structured_outputs"),
        ("guided_grammar", "structured_outputs"),
        ("guided_decoding_backend", "structured_outputs"),
        ("chat_template", "chat_template_kwargs"),
        ("functions", "tools"),
        ("function_call", "tool_choice"),
    ],
)
def test_older_names_are_refused_with_what_replaces_them(
    name: str, newer: str, fake: LiveServer
) -> None:
    error = refusal(fake, CHAT, {"messages": HI, name: {"type": "object"}})
    assert error["param"] == name and newer in error["message"]


def test_a_template_cannot_be_brought_in_by_the_back_door(fake: LiveServer) -> None:
    body = {"messages": HI, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}
    assert refusal(fake, CHAT, body)["param"] == "chat_template_kwargs.chat_template"


@pytest.mark.parametrize(
    "path", ["/v1/moderations", "/v1/files", "/v1/audio/speech", "/v1/images/generations"]
)
def test_other_routes_of_the_api_say_why_they_are_missing(path: str, fake: LiveServer) -> None:
    message = refusal(fake, path, {}, 404)["message"]
    assert message.startswith(f"there is no {path} here: ")
