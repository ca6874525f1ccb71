"""Calls of /v1/responses by the openai library, as authors of applications write them.

Each function is one snippet; see snippets_openai.
"""

from __future__ import annotations

import json
from typing import Any

from tests.clients.addresses import MODEL
from tests.clients.snippets_openai import ASK, WEATHER, Ticket, client, get_weather, scripted

FLAT: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": WEATHER["function"]["parameters"],
    "strict": False,
}


def response_of_a_text() -> None:
    response = client.responses.create(
        model=MODEL,
        input="def hello(",
        max_output_tokens=8,
        store=True,
        metadata={"a": "b"},
        user="me",
    )
    assert response.output_text and response.metadata == {"a": "b"} and response.user == "me"


def response_streamed() -> None:
    kinds = [
        event.type
        for event in client.responses.create(
            model=MODEL, input="a", max_output_tokens=4, stream=True
        )
    ]
    assert kinds[0] == "response.created" and "response.output_text.delta" in kinds


def response_with_the_stream_helper() -> None:
    with client.responses.stream(model=MODEL, input="def f(", max_output_tokens=4) as stream:
        text = "".join(
            event.delta for event in stream if event.type == "response.output_text.delta"
        )
        # The helper waits for an answer that is complete; this one may be cut off.
    assert text


def response_in_a_form() -> None:
    response = client.responses.parse(
        model=MODEL, input="a ticket", text_format=Ticket, max_output_tokens=1000
    )
    assert isinstance(response.output_parsed, Ticket)


def response_with_a_tool_loop() -> None:
    history: list[Any] = [*ASK]
    for _ in range(4):
        response = scripted.responses.create(model="scripted", input=history, tools=[FLAT])
        history += response.output
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            break
        history += [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": get_weather(**json.loads(call.arguments)),
            }
            for call in calls
        ]
    assert response.output_text == "It is 21 degrees in Bern."


def response_with_a_tool_loop_of_dumps() -> None:
    first = scripted.responses.create(model="scripted", input=ASK, tools=[FLAT])
    items = [item.model_dump() for item in first.output]
    call_id = next(item["call_id"] for item in items if item["type"] == "function_call")
    last = scripted.responses.create(
        model="scripted",
        tools=[FLAT],
        input=[  # type: ignore[list-item]
            *ASK,
            *items,
            {"type": "function_call_output", "call_id": call_id, "output": "wet"},
        ],
    )
    assert last.output_text == "It is 21 degrees in Bern." and last.tools[0].type == "function"


def response_with_a_streamed_call() -> None:
    events = list(scripted.responses.create(model="scripted", input=ASK, tools=[FLAT], stream=True))
    deltas = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
    (done,) = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert json.loads(deltas) == json.loads(done.arguments) == {"city": "Bern"}
    last = events[-1]
    assert last.type == "response.completed" and [item.type for item in last.response.output] == [
        "function_call"
    ]


def response_with_a_tool_that_must_be_called() -> None:
    response = client.responses.create(
        model=MODEL,
        input="the weather",
        tools=[FLAT],
        max_output_tokens=1000,
        tool_choice={"type": "function", "name": "get_weather"},
    )
    (item,) = response.output
    assert item.type == "function_call" and json.loads(item.arguments).keys() == {"city"}
