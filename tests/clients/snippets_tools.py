"""Calls of tools by the openai library, as authors of applications write them.

Each function is one snippet; see snippets_openai.
"""

from __future__ import annotations

import json
from typing import Any

import openai
from pydantic import BaseModel

from tests.clients.snippets_openai import ASK, MODEL, WEATHER, client, get_weather, scripted


def a_tool_that_must_be_called() -> None:
    completion = client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=1000,
    )
    choice = completion.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.function.name == "get_weather"
    assert json.loads(call.function.arguments).keys() == {"city"}


def a_tool_chosen_by_name() -> None:
    completion = client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        tools=[WEATHER],
        max_tokens=1000,
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
    )
    assert completion.choices[0].message.tool_calls


def a_tool_loop() -> None:
    messages: list[Any] = [*ASK]
    for _ in range(4):
        message = (
            scripted.chat.completions.create(model="scripted", messages=messages, tools=[WEATHER])
            .choices[0]
            .message
        )
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            assert call.type == "function"
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": call.id,
                    "name": call.function.name,
                    "content": get_weather(**json.loads(call.function.arguments)),
                }
            )
    assert messages[-1].content == "It is 21 degrees in Bern."


def a_tool_loop_of_dumps() -> None:
    messages: list[Any] = [*ASK]
    message = (
        scripted.chat.completions.create(model="scripted", messages=messages, tools=[WEATHER])
        .choices[0]
        .message
    )
    assert message.tool_calls
    messages += [
        message.model_dump(),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "wet"},
    ]
    last = scripted.chat.completions.create(model="scripted", messages=messages, tools=[WEATHER])
    assert last.choices[0].finish_reason == "stop"


def at_most_one_call_of_two() -> None:
    tools = [
        {"type": "function", "function": {"name": "call_twice", "parameters": {"type": "object"}}}
    ]
    several = scripted.chat.completions.create(model="scripted", messages=ASK, tools=tools)
    one = scripted.chat.completions.create(  # type: ignore[call-overload]
        model="scripted", messages=ASK, tools=tools, parallel_tool_calls=False
    )
    assert len(several.choices[0].message.tool_calls or ()) == 2
    assert (
        len(one.choices[0].message.tool_calls) == 1 and one.choices[0].finish_reason == "tool_calls"
    )


def a_streamed_call() -> None:
    name, arguments = "", ""
    for chunk in scripted.chat.completions.create(
        model="scripted", messages=ASK, tools=[WEATHER], stream=True
    ):
        for call in chunk.choices[0].delta.tool_calls or ():
            assert call.function is not None
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    assert name == "get_weather" and json.loads(arguments) == {"city": "Bern"}


def a_call_parsed_into_a_pydantic_model() -> None:
    class GetWeather(BaseModel):
        city: str

    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    # The server holds the arguments of a strict function to its schema.
    completion = client.chat.completions.parse(
        model=MODEL,
        messages=ASK,
        tools=[tool],
        max_tokens=1000,
        top_p=0.9,
        seed=1,
        tool_choice="required",
        parallel_tool_calls=False,
    )
    if completion.choices[0].finish_reason == "tool_calls":
        (call,) = completion.choices[0].message.tool_calls or ()
        assert isinstance(call.function.parsed_arguments, GetWeather)
