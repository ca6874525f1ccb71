"""Tool calls and reasoning, from the model's words to the client's objects.

Answers are streamed and not.
"""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.server.scripted import scripted_server

CHAT: Any = [{"role": "user", "content": "weather?"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "It.",
            "parameters": {"type": "object", "properties": {"city": {}}},
        },
    }
]
CALLS = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>',
    "llama3_json": '{"name": "weather", "parameters": {"city": "Bern"}}; '
    '{"name": "weather", "parameters": {"city": "Ulm"}}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Bern"}}, '
    '{"name": "weather", "arguments": {"city": "Ulm"}}]',
}
CALLS["qwen3"] = CALLS["hermes"]


async def ask(client: openai.AsyncOpenAI, stream: bool, **options: Any) -> tuple[Any, str | None]:
    """Return the message, from one body or from a stream's deltas, and the finish reason."""
    options = {"model": "scripted", "messages": CHAT, **options}
    if not stream:
        whole = (await client.chat.completions.create(**options)).choices[0]
        return whole.message.model_dump(exclude_none=True), whole.finish_reason
    message: dict[str, Any] = {}
    reason = None
    async for chunk in await client.chat.completions.create(**options, stream=True):
        delta = chunk.choices[0].delta.model_dump(exclude_none=True)
        reason = chunk.choices[0].finish_reason
        for call in delta.pop("tool_calls", []):
            calls = message.setdefault("tool_calls", [])
            if call.pop("index") == len(calls):
                calls.append(
                    {
                        "function": {"name": call["function"]["name"], "arguments": ""},
                        "id": call["id"],
                        "type": call["type"],
                    }
                )
            calls[-1]["function"]["arguments"] += call["function"].get("arguments", "")
        for key, text in delta.items():
            message[key] = message.get(key, "") + text
    return {key: value for key, value in message.items() if value != ""}, reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("parser", CALLS)
async def test_calls_reach_the_client_as_objects(
    parser: str, stream: bool, fake_model: str
) -> None:
    async with scripted_server(fake_model, tool_call_parser=parser) as (engine, client):
        engine.says = CALLS[parser]
        message, reason = await ask(client, stream, tools=TOOLS)
        assert reason == "tool_calls" and message.keys() == {"role", "tool_calls"}
        assert [
            (c["function"]["name"], json.loads(c["function"]["arguments"]), c["type"])
            for c in message["tool_calls"]
        ] == [("weather", {"city": "Bern"}, "function"), ("weather", {"city": "Ulm"}, "function")]
        assert len({c["id"] for c in message["tool_calls"]}) == 2
        assert engine.prompts()[0].startswith('<tool>{"type": "function"')
        # The next turn sends the call and its result back to the model.
        engine.says = "Rain."
        turn: Any = [
            *CHAT,
            message,
            {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "wet"},
        ]
        answer, reason = await ask(client, stream, messages=turn, tools=TOOLS)
        assert answer == {"role": "assistant", "content": "Rain."} and reason == "stop"
        assert "<assistant>[weather Bern][weather Ulm]<tool>wet<assistant>" in engine.prompts()[1]


@pytest.mark.parametrize("stream", [False, True])
async def test_without_tools_the_words_stay_words(stream: bool, fake_model: str) -> None:
    async with scripted_server(fake_model, tool_call_parser="hermes") as (engine, client):
        engine.says = CALLS["hermes"]
        for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            message, reason = await ask(client, stream, **options)
            assert message["content"] == engine.says and reason == "stop"
        assert engine.prompts() == ["<user>weather?<assistant>"] * 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1"])
async def test_reasoning_is_told_apart(parser: str, stream: bool, fake_model: str) -> None:
    async with scripted_server(fake_model, reasoning_parser=parser, tool_call_parser="hermes") as (
        engine,
        client,
    ):
        engine.says = "<think>\nSun or rain?\n</think>\n\nRain."
        message, reason = await ask(client, stream)
        assert message == {
            "role": "assistant",
            "reasoning_content": "Sun or rain?",
            "content": "Rain.",
        }
        engine.says = "<think>\nI shall call.\n</think>\n\n" + CALLS["hermes"]
        message, reason = await ask(client, stream, tools=TOOLS)
        assert message["reasoning_content"] == "I shall call." and len(message["tool_calls"]) == 2
        assert reason == "tool_calls" and "content" not in message


async def test_a_parser_of_special_tokens_cannot_go_without_them(fake_model: str) -> None:
    async with scripted_server(fake_model, tool_call_parser="mistral") as (_, client):
        with pytest.raises(openai.BadRequestError, match="skip_special_tokens"):
            await ask(client, False, tools=TOOLS, extra_body={"skip_special_tokens": True})


async def test_a_model_that_cannot_be_told_of_tools_refuses_them(fake_model: str) -> None:
    async with scripted_server(fake_model, tool_call_parser="hermes") as (engine, client):
        engine.tokenizer.chat_template = "{{ messages }}"
        with pytest.raises(openai.BadRequestError, match="chat template has no place"):
            await ask(client, False, tools=TOOLS)


async def test_parts_and_the_developer_s_message_reach_the_template(fake_model: str) -> None:
    async with scripted_server(fake_model) as (engine, client):
        engine.says = "ok"
        await ask(
            client,
            False,
            messages=[
                {"role": "developer", "content": "be"},
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                },
            ],
        )
        assert engine.prompts() == ["<system>be<user>a\nb<assistant>"]
