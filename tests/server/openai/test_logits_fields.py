"""Logprobs, penalties and biases by the openai client.

They have OpenAI's shapes and are equal in every form of an answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from sidestep.frontend.server.openapi import make_document
from tests.server.live import ANSWER_S, LiveServer
from tests.server.openai.test_fields import refusal

CHAT: list[Any] = [{"role": "user", "content": "Write Python: a café in '日本'"}]
PROMPT = "def get_name(self, été):\n    "
MODEL = "tiny-python"


@pytest.fixture
def client(tiny: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{tiny.url}/v1", api_key="none", max_retries=0, timeout=ANSWER_S
    ) as made:
        yield made


def check_content(entries: list[Any], text: str, most: int) -> None:
    """Check the logprobs of a chat or a response."""
    assert b"".join(bytes(e.bytes) for e in entries).decode("utf-8", "replace").startswith(text)
    for entry in entries:
        assert entry.token == bytes(entry.bytes).decode("utf-8", "replace")
        assert len(entry.top_logprobs) == most
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True) and all(
            v <= 0 for v in [entry.logprob, *values]
        )
        assert math.fsum(map(math.exp, values)) < 1.001
        if most:  # greedy
            assert (entry.token, entry.logprob, entry.bytes) == (
                entry.top_logprobs[0].token,
                entry.top_logprobs[0].logprob,
                entry.top_logprobs[0].bytes,
            )


@pytest.mark.parametrize("most", [0, 3, 20])
def test_chats(most: int, client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": CHAT,
        "temperature": 0,
        "max_tokens": 24,
        "logprobs": True,
        "top_logprobs": most,
    }
    whole = client.chat.completions.create(**options)
    choice = whole.choices[0]
    assert (
        choice.logprobs is not None
        and choice.logprobs.content is not None
        and whole.usage is not None
    )
    assert len(choice.logprobs.content) == whole.usage.completion_tokens
    check_content(choice.logprobs.content, choice.message.content or "", most)
    streamed: list[Any] = []
    for chunk in client.chat.completions.create(**options, stream=True):
        if (logprobs := chunk.choices[0].logprobs) is not None:
            streamed += logprobs.content or []
    assert streamed == choice.logprobs.content


def test_chats_that_do_not_ask_have_none(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": CHAT, "max_tokens": 4}
    assert client.chat.completions.create(**options, logprobs=False).choices[0].logprobs is None
    assert all(
        c.choices[0].logprobs is None
        for c in client.chat.completions.create(**options, stream=True)
    )


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("most", [0, 4])
def test_completions(most: int, echo: bool, client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "prompt": PROMPT,
        "temperature": 0,
        "max_tokens": 20,
        "logprobs": most,
        "echo": echo,
    }
    choice = client.completions.create(**options).choices[0]
    logprobs = choice.logprobs
    assert (
        logprobs is not None
        and logprobs.tokens
        and logprobs.text_offset
        and logprobs.token_logprobs
    )
    assert len(logprobs.tokens) == len(logprobs.text_offset) == len(logprobs.token_logprobs)
    assert logprobs.top_logprobs is not None and len(logprobs.top_logprobs) == len(logprobs.tokens)
    assert choice.text.startswith(PROMPT) == echo
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert "\N{REPLACEMENT CHARACTER}" in token or choice.text[offset:].startswith(token)
    if echo:
        assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    for token, value, top in list(
        zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
    )[echo:]:
        assert top is not None and (top[token] == value or "\N{REPLACEMENT CHARACTER}" in token)
        assert 1 <= len(top) <= most + 1
    parts = [c.choices[0].logprobs for c in client.completions.create(**options, stream=True)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [each for part in parts if part for each in getattr(part, name)] == getattr(
            logprobs, name
        )


def test_responses(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "input": "Write Python",
        "temperature": 0,
        "max_output_tokens": 16,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    made = client.responses.create(**options)
    part: Any = made.output[0].content[0]
    assert made.usage is not None and len(part.logprobs) == made.usage.output_tokens
    check_content(part.logprobs, part.text, 2)
    streamed, done = [], None
    for event in client.responses.create(**options, stream=True):
        if event.type == "response.output_text.delta":
            streamed += event.logprobs
        elif event.type == "response.output_text.done":
            done = event.logprobs
        elif event.type in ("response.completed", "response.incomplete"):
            last: Any = event.response.output[0].content[0]
            assert last.logprobs == part.logprobs
    assert done is not None and [e.to_dict() for e in done] == [e.to_dict() for e in part.logprobs]
    assert [e.to_dict() for e in streamed] == [e.to_dict() for e in part.logprobs][: len(streamed)]
    assert len(streamed) >= len(part.logprobs) - 1, "the end of sequence has no text"


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (
            "/v1/chat/completions",
            {"messages": CHAT, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1},
            "ChatCompletion",
        ),
        (
            "/v1/completions",
            {"prompt": PROMPT, "logprobs": 2, "echo": True, "prompt_logprobs": 1},
            "Completion",
        ),
        ("/v1/responses", {"input": PROMPT, "top_logprobs": 2}, "ResponsesAnswer"),
    ],
)
def test_the_document_has_what_is_answered(
    path: str, body: dict[str, Any], name: str, tiny: LiveServer
) -> None:
    answer = tiny.post(path, body).raise_for_status().json()
    schema = {"$ref": f"#/components/schemas/{name}", **make_document("0")}
    jsonschema.Draft202012Validator(schema).validate(answer)


def test_prompt_logprobs(tiny: LiveServer) -> None:
    tokens = tiny.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    for _ in range(2):  # the second time the prompt is cached
        body = {"prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 2}
        (choice,) = tiny.post("/v1/completions", body).raise_for_status().json()["choices"]
        found = choice["prompt_logprobs"]
        assert found[0] is None and len(found) == len(tokens) and choice["logprobs"] is None
        for token, entries in zip(tokens[1:], found[1:], strict=True):
            assert entries[str(token)].keys() == {"logprob", "rank", "decoded_token"}
            assert 2 <= len(entries) <= 3 and sorted(e["rank"] for e in entries.values())[0] == 1
    chat = tiny.post(
        "/v1/chat/completions", {"messages": CHAT, "max_tokens": 1, "prompt_logprobs": 0}
    )
    assert len(chat.json()["prompt_logprobs"]) == chat.json()["usage"]["prompt_tokens"]


def test_logits_are_changed(client: openai.OpenAI, tiny: LiveServer) -> None:
    def complete(**more: Any) -> Any:
        extra = {
            name: more.pop(name)
            for name in list(more)
            if name not in ("logit_bias", "presence_penalty", "frequency_penalty")
        }
        return client.completions.create(
            model=MODEL, prompt=PROMPT, temperature=0, max_tokens=16, **more, extra_body=extra
        ).choices[0]

    (token,) = tiny.post("/tokenize", {"prompt": "x", "add_special_tokens": False}).json()["tokens"]
    plain = complete().text
    assert complete(logit_bias={str(token): 100}).text == "x" * 16
    assert complete(allowed_token_ids=[token]).text == "x" * 16
    assert (
        complete(
            repetition_detection={"max_pattern_size": 1}, allowed_token_ids=[token]
        ).finish_reason
        == "repetition"
    )
    mixed = complete(logit_bias={str(token): 100}, frequency_penalty=2, repetition_penalty=100)
    assert mixed.text != "x" * 16
    words = plain.split()
    assert not set(words) & set(complete(bad_words=words).text.split())
    assert complete(presence_penalty=0, frequency_penalty=0, repetition_penalty=1).text == plain


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"9999999": 1}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [10**7]}, "allowed_token_ids"),
        ({"bad_words": ["w"] * 129}, "bad_words"),
        ({"bad_words": ["\n"]}, "bad_words"),
        ({"bad_words": ["x" * 257]}, "bad_words[0]"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"logprobs": "x"}, "logprobs"),
        (
            {"repetition_detection": {"max_pattern_size": 0}},
            "repetition_detection.max_pattern_size",
        ),
        (
            {"repetition_detection": {"max_pattern_size": 1, "min_pattern_size": 2}},
            "repetition_detection.max_pattern_size",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_wrong_values_are_refused_by_name(
    path: str, given: dict[str, Any], param: str, fake: LiveServer
) -> None:
    body = {"messages": CHAT} if "chat" in path else {"prompt": "a"}
    error = refusal(fake, path, {**body, **given})
    assert (error["param"] or "").startswith(param) and error["message"].startswith(param), error


def test_wrong_numbers_of_logprobs_are_refused(fake: LiveServer) -> None:
    chat = {"messages": CHAT}
    assert (
        refusal(fake, "/v1/chat/completions", {**chat, "top_logprobs": 2})["param"]
        == "top_logprobs"
    )
    assert (
        refusal(fake, "/v1/chat/completions", {**chat, "logprobs": True, "top_logprobs": 21})[
            "param"
        ]
        == "top_logprobs"
    )
    assert refusal(fake, "/v1/chat/completions", {**chat, "logprobs": 2})["param"] == "logprobs"
    assert refusal(fake, "/v1/completions", {"prompt": "a", "logprobs": 21})["param"] == "logprobs"
    assert (
        refusal(fake, "/v1/completions", {"prompt": "a", "logprobs": True})["param"] == "logprobs"
    )
    assert (
        refusal(fake, "/v1/responses", {"input": "a", "include": ["file_search_call.results"]})[
            "param"
        ]
        == "include[0]"
    )
