"""Calls by the openai library, as authors of applications write them.

Each function is one snippet. `client` finds the server in OPENAI_BASE_URL, as the library does.
MODEL is the bundled model. SCRIPTED is a server whose model calls the first tool in its prompt, and
answers when it has the tool's output.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any, Literal

import openai
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

from tests.clients.addresses import MODEL, SCRIPTED

client = OpenAI()
scripted = OpenAI(base_url=SCRIPTED)

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ASK: Any = [{"role": "user", "content": "What is the weather in Bern?"}]
HELLO: Any = [{"role": "user", "content": "def hello("}]


def get_weather(city: str) -> str:
    return f"21 degrees in {city}"


class Kind(StrEnum):
    BUG = "bug"
    WISH = "wish"


class Ticket(BaseModel):
    kind: Kind
    urgent: bool
    stars: Literal[1, 2, 3]


# Chats.


def chat_with_system_and_user() -> None:
    completion = client.chat.completions.create(
        model=MODEL,
        max_tokens=8,
        messages=[
            {"role": "system", "content": "You write Python."},
            {"role": "user", "content": "def add(a, b):"},
        ],
    )
    assert completion.choices[0].message.role == "assistant"
    assert isinstance(completion.choices[0].message.content, str)


def chat_with_developer_message_and_max_completion_tokens() -> None:
    completion = client.chat.completions.create(
        model=MODEL,
        max_completion_tokens=5,
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": "import os"},
        ],
    )
    assert completion.usage is not None and completion.usage.completion_tokens <= 5


def chat_streamed() -> None:
    stream = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=12, stream=True)
    text, reason = "", None
    for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        reason = chunk.choices[0].finish_reason or reason
    assert text and reason in ("stop", "length")


def chat_streamed_with_usage() -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=6,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens <= 6


def chat_with_the_stream_helper() -> None:
    with client.chat.completions.stream(
        model=MODEL,
        messages=HELLO,
        max_tokens=50,
        extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content


def several_choices() -> None:
    completion = client.chat.completions.create(
        model=MODEL, messages=HELLO, n=3, temperature=0.9, max_tokens=5
    )
    assert [choice.index for choice in completion.choices] == [0, 1, 2]


def the_same_seed_gives_the_same_text() -> None:
    texts = {
        client.chat.completions.create(
            model=MODEL, messages=HELLO, seed=7, temperature=1, max_tokens=8
        )
        .choices[0]
        .message.content
        for _ in range(2)
    }
    assert len(texts) == 1


def a_seed_of_minus_one_is_none() -> None:
    assert client.chat.completions.create(
        model=MODEL, messages=HELLO, seed=-1, max_tokens=2
    ).choices


def penalties_and_logit_bias() -> None:
    completion = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=6,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        top_p=0.9,
        logit_bias={"5": -100},
    )
    assert completion.choices


def stop_strings() -> None:
    completion = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=40, stop=["(", "\n"]
    )
    text = completion.choices[0].message.content or ""
    assert "(" not in text and "\n" not in text


def log_probabilities() -> None:
    completion = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=3, logprobs=True, top_logprobs=2
    )
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None and logprobs.content
    assert all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in logprobs.content)


def content_as_parts() -> None:
    completion = client.chat.completions.create(
        model=MODEL,
        max_tokens=3,
        messages=[
            {
                "role": "user",
                "content": [{"type": "text", "text": "def f("}, {"type": "text", "text": "x):"}],
            }
        ],
    )
    assert completion.choices


def a_conversation_sent_back_as_objects() -> None:
    messages: list[Any] = [*HELLO]
    for question in ("and then?", "and now?"):
        message = (
            client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4)
            .choices[0]
            .message
        )
        messages += [message, {"role": "user", "content": question}]
    assert len(messages) == 5


def a_conversation_sent_back_as_dumps() -> None:
    messages: list[Any] = [*HELLO]
    for question in ("and then?", "and now?"):
        message = (
            client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4)
            .choices[0]
            .message
        )
        messages += [message.model_dump(), {"role": "user", "content": question}]
    assert messages[1]["refusal"] is None


def fields_that_ask_nothing_of_the_model() -> None:
    completion = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=2,
        user="user-1",
        metadata={"job": "7"},
        store=True,
        prompt_cache_key="k",
        safety_identifier="s",
        service_tier="auto",
        parallel_tool_calls=False,
    )
    assert completion.choices


def fields_of_other_servers_in_extra_body() -> None:
    completion = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=4,
        extra_body={
            "top_k": 20,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "return_token_ids": True,
        },
    )
    choice: Any = completion.choices[0]
    assert len(choice.token_ids) == completion.usage.completion_tokens  # type: ignore[union-attr]
    assert len(completion.prompt_token_ids) == completion.usage.prompt_tokens  # type: ignore


def going_on_with_a_begun_answer() -> None:
    completion = client.chat.completions.create(
        model=MODEL,
        max_tokens=4,
        messages=[*HELLO, {"role": "assistant", "content": "def hello(name):\n"}],
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )
    assert completion.choices[0].message.content


def the_raw_answer_and_its_headers() -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=HELLO, max_tokens=2
    )
    assert raw.status_code == 200 and raw.headers["x-request-id"]
    assert raw.parse().object == "chat.completion"


# Forms.


def json_mode() -> None:
    completion = client.chat.completions.create(
        model=MODEL,
        max_tokens=100,
        temperature=0,
        response_format={"type": "json_object"},
        messages=[{"role": "user", "content": "Answer in JSON."}],
    )
    choice = completion.choices[0]
    assert choice.message.content is not None and choice.message.content.lstrip().startswith("{")
    if choice.finish_reason == "stop":
        json.loads(choice.message.content)


def a_json_schema() -> None:
    schema: Any = {
        "name": "ticket",
        "strict": True,
        "schema": {
            "type": "object",
            "additionalProperties": False,
            "required": ["kind", "urgent"],
            "properties": {"kind": {"enum": ["bug", "wish"]}, "urgent": {"type": "boolean"}},
        },
    }
    completion = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=1000,
        response_format={"type": "json_schema", "json_schema": schema},
    )
    made = json.loads(completion.choices[0].message.content or "")
    assert made["kind"] in ("bug", "wish") and isinstance(made["urgent"], bool)


def a_parsed_pydantic_model() -> None:
    completion = client.chat.completions.parse(
        model=MODEL, messages=HELLO, max_tokens=1000, response_format=Ticket
    )
    message = completion.choices[0].message
    assert isinstance(message.parsed, Ticket)
    again = client.chat.completions.create(  # the parsed message is sent back
        model=MODEL, messages=[*HELLO, message.model_dump(), *HELLO], max_tokens=2
    )  # type: ignore[list-item]
    assert again.choices


def a_choice_by_structured_outputs() -> None:
    completion = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=20,
        extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
    )
    assert completion.choices[0].message.content in ("yes", "no")


# Completions.


def completion_of_a_prompt() -> None:
    completion = client.completions.create(
        model=MODEL, prompt="def get_name(", max_tokens=8, temperature=0
    )
    assert completion.object == "text_completion" and completion.choices[0].text


def completions_of_several_prompts() -> None:
    completion = client.completions.create(
        model=MODEL, prompt=["import ", "class "], max_tokens=3, n=2
    )
    assert len(completion.choices) == 4


def completion_streamed() -> None:
    chunks = client.completions.create(model=MODEL, prompt="for i in", max_tokens=5, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks)


def the_probability_of_a_text() -> None:
    completion = client.completions.create(
        model=MODEL, prompt="def f(x): return x", max_tokens=0, echo=True, logprobs=1
    )
    choice = completion.choices[0]
    assert choice.text == "def f(x): return x" and choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None and choice.logprobs.token_logprobs[0] is None
    assert all(number < 0 for number in choice.logprobs.token_logprobs[1:] if number is not None)
    assert completion.usage is not None and completion.usage.completion_tokens == 0


# Clients.


async def asynchronous_calls_at_once() -> None:
    import asyncio

    async with AsyncOpenAI() as many:
        made = await asyncio.gather(
            *(
                many.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=3)
                for _ in range(5)
            )
        )
    assert len({completion.id for completion in made}) == 5


async def an_asynchronous_stream() -> None:
    async with AsyncOpenAI() as one:
        stream = await one.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=5, stream=True
        )
        assert [chunk async for chunk in stream]


def a_stream_that_is_left() -> None:
    with client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=500, stream=True
    ) as stream:
        next(iter(stream))


def a_timeout() -> None:
    try:
        client.with_options(timeout=0.001, max_retries=0).chat.completions.create(
            model=MODEL, messages=HELLO
        )
    except openai.APITimeoutError:
        return
    raise AssertionError("no timeout")


def retries_are_an_option() -> None:
    assert client.with_options(max_retries=5, timeout=30).models.list().data


def the_models() -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).owned_by == "sidestep"


class Bounded(BaseModel):
    """A nested form."""

    size: int = Field(ge=0, le=9)
    tickets: list[Ticket] = Field(max_length=1)


def a_nested_form() -> None:
    completion = client.chat.completions.parse(
        model=MODEL, messages=HELLO, max_tokens=1900, response_format=Bounded
    )
    assert isinstance(completion.choices[0].message.parsed, Bounded)
