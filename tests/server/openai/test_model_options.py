"""Options of the engine that change the server's requests and its sampling."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sidestep.executor.runner.fake import expected_tokens
from tests.server.live import LiveServer
from tests.server.scripted import scripted_server

DEFAULTS = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05, "max_tokens": 9}
CHAT: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def without_tokenizer(
    fake_model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    """Start a server on a folder that has no tokenizer."""
    folder = tmp_path_factory.mktemp("ids-only")
    shutil.copy(Path(fake_model) / "config.json", folder)
    (folder / "generation_config.json").write_text('{"temperature": 0, "max_new_tokens": 4}')
    with LiveServer(
        str(folder),
        "--device",
        "fake",
        "--skip-tokenizer-init",
        "--hf-overrides",
        '{"max_position_embeddings": 300}',
    ) as server:
        yield server


def vocab_size(folder: str) -> int:
    size: int = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
    return size


def test_without_a_tokenizer_the_server_takes_token_ids(
    without_tokenizer: LiveServer, fake_model: str
) -> None:
    body = {"prompt": [1, 2, 3], "ignore_eos": True, "logprobs": 1}
    answer = without_tokenizer.post("/v1/completions", body)
    (choice,) = answer.raise_for_status().json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    assert all(name.startswith("token_id:") for name in choice["logprobs"]["tokens"])
    assert len(choice["logprobs"]["tokens"]) == 4
    again = without_tokenizer.post("/v1/completions", {**body, "return_token_ids": True}).json()
    (choice,) = again["choices"]
    assert choice["token_ids"] == expected_tokens([1, 2, 3], 4, 0, vocab_size(fake_model))
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert without_tokenizer.http.get("/v1/models").json()["data"][0]["max_model_len"] == 300


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": "text"}, "prompt"),
        ("/v1/chat/completions", {"messages": CHAT}, "messages"),
        ("/v1/completions", {"prompt": [1], "echo": True}, "echo"),
        ("/v1/responses", {"input": "hi"}, "messages"),
        ("/v1/completions", {"prompt": [1], "stop": ["x"]}, "stop"),
        ("/tokenize", {"prompt": "hi"}, "prompt"),
        ("/detokenize", {"tokens": [1]}, "tokens"),
        (
            "/v1/completions",
            {"prompt": [1], "response_format": {"type": "json_object"}},
            "response_format",
        ),
    ],
)
def test_what_needs_text_is_refused_in_a_sentence(
    without_tokenizer: LiveServer, path: str, body: dict[str, Any], field: str
) -> None:
    answer = without_tokenizer.post(path, body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith(f"{field}: ")
    assert "(skip_tokenizer_init)" in answer.json()["error"]["message"]


async def test_fields_that_a_request_leaves_open_are_the_model_s(fake_model: str) -> None:
    async with scripted_server(fake_model) as (engine, client):
        config = engine.llm._config
        engine.llm._config = dataclasses.replace(config, sampling_defaults=DEFAULTS)

        def last() -> dict[str, Any]:
            sampling = engine.channel.added[-1].sampling
            return {name: getattr(sampling, name) for name in DEFAULTS}

        await client.chat.completions.create(model="scripted", messages=CHAT)
        assert last() == DEFAULTS
        await client.chat.completions.create(
            model="scripted",
            messages=CHAT,
            temperature=0,
            max_tokens=3,
            extra_body={"top_k": -1, "repetition_penalty": 1},
        )
        assert last() == {"temperature": 0, "top_k": -1, "repetition_penalty": 1, "max_tokens": 3}
        await client.chat.completions.create(
            model="scripted", messages=CHAT, extra_body={"min_tokens": 12}
        )
        assert last() == {**DEFAULTS, "max_tokens": 12}
        await client.completions.create(model="scripted", prompt="hi", temperature=1.5)
        assert last() == {**DEFAULTS, "temperature": 1.5}
        answer = await client.responses.create(model="scripted", input="hi")
        assert last() == DEFAULTS and answer.temperature == 0.6
        engine.llm._config = config
        await client.completions.create(model="scripted", prompt="hi")
        assert last() == {"temperature": 1, "top_k": 0, "repetition_penalty": 1, "max_tokens": 16}


async def test_temperature_last_reaches_the_engine_from_every_route(fake_model: str) -> None:
    async with scripted_server(fake_model) as (engine, client):
        for value in (True, False):
            body: dict[str, Any] = {"model": "scripted", "extra_body": {"temperature_last": value}}
            await client.chat.completions.create(messages=CHAT, **body)
            await client.completions.create(prompt="hi", **body)
            await client.responses.create(input="hi", **body)
            asked = [message.sampling for message in engine.channel.added[-3:]]
            assert [sampling.temperature_last for sampling in asked] == [value] * 3


async def test_a_request_with_tools_uses_the_template_for_them(
    fake_model: str, tmp_path: Path
) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(fake_model) / name, tmp_path)
    file = tmp_path / "tokenizer_config.json"
    templates = {"default": "plain", "tool_use": "tools: {{ tools | length }}"}
    named = [{"name": name, "template": template} for name, template in templates.items()]
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": named}))
    tool: Any = {"type": "function", "function": {"name": "f"}}
    async with scripted_server(str(tmp_path), tool_call_parser="hermes") as (engine, client):
        await client.chat.completions.create(model="scripted", messages=CHAT, tools=[tool])
        await client.chat.completions.create(model="scripted", messages=CHAT)
        assert engine.prompts() == ["tools: 1", "plain"]
