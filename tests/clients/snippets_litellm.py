"""Calls by LiteLLM, as authors of applications write them.

Each function is one snippet; see snippets_openai.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import litellm
from litellm import Router, acompletion, batch_completion, completion, text_completion
from pydantic import BaseModel

from tests.clients.addresses import MODEL, SCRIPTED

URL = os.environ["OPENAI_BASE_URL"]
HELLO = [{"role": "user", "content": "def hello("}]
ASK = [{"role": "user", "content": "What is the weather in Bern?"}]
HERE: Any = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": "none"}
THERE: Any = {"model": "openai/scripted", "api_base": SCRIPTED, "api_key": "none"}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
        },
    },
}


class Verdict(BaseModel):
    good: bool


def a_completion() -> None:
    made = completion(**HERE, messages=HELLO, max_tokens=6)
    assert isinstance(made.choices[0].message.content, str) and made.usage.completion_tokens <= 6


def a_completion_through_the_vllm_provider() -> None:
    made = completion(
        model=f"hosted_vllm/{MODEL}", api_base=URL, api_key="none", messages=HELLO, max_tokens=4
    )
    assert made.choices[0].finish_reason in ("stop", "length")


def a_stream() -> None:
    chunks = list(completion(**HERE, messages=HELLO, max_tokens=6, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def a_stream_with_usage_built_into_one() -> None:
    chunks = list(
        completion(
            **HERE,
            messages=HELLO,
            max_tokens=6,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    built: Any = litellm.stream_chunk_builder(chunks, messages=HELLO)
    assert built.usage.completion_tokens <= 6 and built.choices[0].message.content


async def an_asynchronous_completion() -> None:
    made = await asyncio.gather(
        *(acompletion(**HERE, messages=HELLO, max_tokens=3) for _ in range(3))
    )
    assert len(made) == 3


async def an_asynchronous_stream() -> None:
    stream: Any = await acompletion(**HERE, messages=HELLO, max_tokens=4, stream=True)
    assert [chunk async for chunk in stream]


def a_batch() -> None:
    assert len(batch_completion(**HERE, messages=[HELLO, HELLO], max_tokens=2)) == 2


def a_text_completion() -> None:
    made = text_completion(
        model=f"text-completion-openai/{MODEL}",
        api_base=URL,
        api_key="none",
        prompt="import ",
        max_tokens=3,
    )
    assert isinstance(made.choices[0].text, str)


def every_parameter() -> None:
    made = completion(
        **HERE,
        messages=HELLO,
        max_tokens=3,
        temperature=0.3,
        top_p=0.9,
        n=1,
        seed=-1,
        stop=["\n\n"],
        presence_penalty=0.1,
        frequency_penalty=0.1,
        user="me",
        logit_bias={"5": -10},
        timeout=60,
        extra_body={"top_k": 5, "metadata": {"job": "1"}},
    )
    assert made.choices


def a_conversation_of_dumps() -> None:
    messages: list[Any] = [*HELLO]
    for question in ("and?", "so?"):
        message = completion(**HERE, messages=messages, max_tokens=4).choices[0].message
        messages += [message.model_dump(), {"role": "user", "content": question}]
    assert len(messages) == 5


def a_function_call_and_its_output() -> None:
    first = completion(**THERE, messages=ASK, tools=[WEATHER])
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    call = message.tool_calls[0]
    assert json.loads(call.function.arguments) == {"city": "Bern"}
    last = completion(
        **THERE,
        tools=[WEATHER],
        messages=[
            *ASK,
            message,
            {"role": "tool", "tool_call_id": call.id, "name": "get_weather", "content": "wet"},
        ],
    )
    assert last.choices[0].message.content == "It is 21 degrees in Bern."


def a_function_call_and_its_output_as_dumps() -> None:
    message = completion(**THERE, messages=ASK, tools=[WEATHER]).choices[0].message
    output = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "wet"}
    last = completion(**THERE, tools=[WEATHER], messages=[*ASK, message.model_dump(), output])
    assert last.choices[0].finish_reason == "stop"


def a_streamed_function_call() -> None:
    chunks = list(completion(**THERE, messages=ASK, tools=[WEATHER], stream=True))
    built: Any = litellm.stream_chunk_builder(chunks)
    message = built.choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Bern"}
    output = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "wet"}
    last = completion(**THERE, tools=[WEATHER], messages=[*ASK, message.model_dump(), output])
    assert last.choices[0].finish_reason == "stop"


def a_function_that_must_be_called_once() -> None:
    made = completion(
        **HERE,
        messages=ASK,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=1000,
    )
    assert len(made.choices[0].message.tool_calls) == 1


def a_pydantic_form() -> None:
    made = completion(**HERE, messages=HELLO, response_format=Verdict, max_tokens=1000)
    assert isinstance(Verdict.model_validate_json(made.choices[0].message.content), Verdict)


def json_mode() -> None:
    made = completion(
        **HERE, messages=HELLO, response_format={"type": "json_object"}, max_tokens=20
    )
    assert made.choices[0].message.content.lstrip().startswith("{")


def a_router() -> None:
    router = Router(
        model_list=[
            {"model_name": "coder", "litellm_params": {**HERE}},
            {"model_name": "weather", "litellm_params": {**THERE}},
        ],
        num_retries=1,
    )
    assert router.completion(model="coder", messages=HELLO, max_tokens=3).choices
    made = router.completion(model="weather", messages=ASK)
    assert made.choices[0].message.content == "It is 21 degrees in Bern."


async def a_router_with_a_fallback() -> None:
    router = Router(
        model_list=[
            {"model_name": "gone", "litellm_params": {**HERE, "model": "openai/gone"}},
            {"model_name": "coder", "litellm_params": {**HERE}},
        ],
        fallbacks=[{"gone": ["coder"]}],
        num_retries=0,
    )
    made = await router.acompletion(model="gone", messages=HELLO, max_tokens=3)
    assert made.choices


def the_responses_api() -> None:
    made: Any = litellm.responses(**HERE, input="def f(", max_output_tokens=6)
    assert made.output[0].content[0].text


def a_context_window_that_is_exceeded() -> None:
    try:
        completion(**HERE, messages=[{"role": "user", "content": "word " * 3000}])
    except litellm.ContextWindowExceededError as error:
        assert "maximum context length is 2048 tokens" in error.message
    else:
        raise AssertionError("served")


def errors_by_their_classes() -> None:
    for given, kind in (
        ({"model": "openai/gone"}, litellm.NotFoundError),
        ({"temperature": 9}, litellm.BadRequestError),
    ):
        try:
            completion(**{**HERE, "messages": HELLO, **given})
        except kind:
            continue
        raise AssertionError(f"no {kind.__name__}")
