"""/v1/responses with the openai client.

The server has the bundled model, or a scripted one where its words matter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.live import ANSWER_S, LiveServer
from tests.server.scripted import scripted_server

MODEL = "tiny-python"


@pytest.fixture
def client(tiny: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{tiny.url}/v1", api_key="none", max_retries=0, timeout=ANSWER_S
    ) as made:
        yield made


def test_a_response_is_the_chat_s_answer(client: openai.OpenAI) -> None:
    made = client.responses.create(
        model=MODEL,
        instructions="Write Python.",
        input="def get_name(",
        temperature=0,
        max_output_tokens=20,
    )
    chat = client.chat.completions.create(
        model=MODEL,
        temperature=0,
        max_tokens=20,
        messages=[
            {"role": "system", "content": "Write Python."},
            {"role": "user", "content": "def get_name("},
        ],
    )
    assert made.output_text == chat.choices[0].message.content
    assert made.usage is not None and chat.usage is not None
    assert made.usage.input_tokens == chat.usage.prompt_tokens
    assert made.usage.output_tokens == chat.usage.completion_tokens
    assert made.status == ("completed" if chat.choices[0].finish_reason == "stop" else "incomplete")
    assert made.to_dict()["store"] is False and made.id.startswith("resp-")


def test_an_answer_that_is_cut_is_incomplete(client: openai.OpenAI) -> None:
    made = client.responses.create(
        model=MODEL, input="a", max_output_tokens=3, extra_body={"ignore_eos": True}
    )
    output: Any = made.output[0]
    assert made.status == "incomplete" and made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens" and output.status == "incomplete"
    late = client.responses.create(
        model=MODEL,
        input="a",
        max_output_tokens=1900,
        extra_body={"ignore_eos": True, "deadline_ms": 50},
    )
    assert late.incomplete_details is not None
    reason: str | None = late.incomplete_details.reason
    assert reason == "deadline"


def test_a_stream_ends_with_the_same_response(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "temperature": 0,
        "max_output_tokens": 20,
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "def f("}]}],
    }
    whole = client.responses.create(**options)
    events = list(client.responses.create(**options, stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = [e.type for e in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{whole.status}",
    ]
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == events[-4].text == events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens


def test_an_answer_may_be_part_of_the_next_input(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="def f(", max_output_tokens=5, temperature=0)
    items = [
        {"role": "user", "content": "def f("},
        *(item.model_dump() for item in first.output),
        {"role": "user", "content": "more"},
    ]
    items[1] = {
        k: v for k, v in items[1].items() if k in ("role", "content", "type", "id", "status")
    }
    sent: Any = items
    second = client.responses.create(model=MODEL, input=sent, max_output_tokens=5)
    assert second.usage is not None and first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_an_item_of_its_own(stream: bool, fake_model: str) -> None:
    async with scripted_server(fake_model, reasoning_parser="qwen3") as (engine, client):
        for engine.says, expected in (
            ("<think>Hm.</think>\n\nYes.", [("reasoning", "Hm."), ("message", "Yes.")]),
            ("<think>Hm.", [("reasoning", "Hm."), ("message", "")]),
            ("", [("message", "")]),
        ):
            options: Any = {"model": "scripted", "input": "well?"}
            if stream:
                events = [e async for e in await client.responses.create(**options, stream=True)]
                made = events[-1].response
                done = [e.item for e in events if e.type == "response.output_item.done"]
                assert [d.id for d in done] == [i.id for i in made.output]
                for index, (_, text) in enumerate(expected):
                    assert (
                        "".join(
                            e.delta
                            for e in events
                            if e.type.endswith("_text.delta") and e.output_index == index
                        )
                        == text
                    )
            else:
                made = await client.responses.create(**options)
            assert [(i.type, i.content[0].text) for i in made.output] == expected
            assert made.status == "completed"


TOOLS: Any = [
    {
        "type": "function",
        "name": "weather",
        "strict": False,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]
CALLS = "<think>Hm.</think>\n\nI look.\n" + "\n".join(
    f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'
    for city in ("Bern", "Ulm")
)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("parallel", [None, False])
async def test_calls_are_items_and_come_back_as_such(
    parallel: bool | None, stream: bool, fake_model: str
) -> None:
    async with scripted_server(fake_model, reasoning_parser="qwen3", tool_call_parser="hermes") as (
        engine,
        client,
    ):
        engine.says = CALLS
        options: Any = {"model": "scripted", "input": "well?", "tools": TOOLS, "stream": stream}
        if parallel is not None:
            options["parallel_tool_calls"] = parallel
        made = await client.responses.create(**options)
        if stream:
            events = [event async for event in made]
            made = events[-1].response
            assert [event.sequence_number for event in events] == list(range(len(events)))
            check_call_events(events, made.output)
        cities = ["Bern", "Ulm"] if parallel is None else ["Bern"]
        assert [item.type for item in made.output] == [
            "reasoning",
            "message",
            *["function_call"] * len(cities),
        ]
        calls: list[Any] = made.output[2:]
        assert [(c.name, json.loads(c.arguments), c.status) for c in calls] == [
            ("weather", {"city": city}, "completed") for city in cities
        ]
        assert made.status == "completed" and made.parallel_tool_calls is (parallel is None)
        assert made.tools[0].name == "weather" and len({c.call_id for c in calls}) == len(cities)
        # The next turn sends the items as they are, with the output of each call.
        engine.says = "Rain."
        outputs: list[Any] = [
            {"type": "function_call_output", "call_id": c.call_id, "output": "wet"} for c in calls
        ]
        last = await client.responses.create(
            model="scripted",
            tools=TOOLS,
            input=[
                {"role": "user", "content": "well?"},
                *made.output,
                *outputs,
            ],
        )
        assert last.output_text == "Rain."
        named = "".join(f"[weather {city}]" for city in cities)
        assert engine.prompts()[1].endswith(
            f"<user>well?<assistant>I look.{named}{'<tool>wet' * len(cities)}<assistant>"
        )


def check_call_events(events: list[Any], items: list[Any]) -> None:
    """Check that each call begins empty, grows to its arguments, and ends as the answer's item."""
    for index, item in enumerate(items):
        if item.type != "function_call":
            continue
        own = [event for event in events if getattr(event, "output_index", None) == index]
        kinds = [event.type for event in own]
        assert kinds[0] == "response.output_item.added" and own[0].item.arguments == ""
        assert kinds[-2:] == ["response.function_call_arguments.done", "response.output_item.done"]
        assert "".join(event.delta for event in own[1:-2]) == own[-2].arguments == item.arguments
        assert own[-1].item == item


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
async def test_a_call_can_be_asked_for(choice: Any, fake_model: str) -> None:
    async with scripted_server(fake_model, tool_call_parser="hermes") as (engine, client):
        engine.says = CALLS
        made = await client.responses.create(
            model="scripted", input="well?", tools=TOOLS, tool_choice=choice
        )
        assert engine.channel.added[0].grammar is not None
        chosen: Any = made.tool_choice
        assert chosen == choice or chosen.model_dump(exclude_none=True) == choice
        none = await client.responses.create(
            model="scripted", input="well?", tools=TOOLS, tool_choice="none"
        )
        assert none.output_text == CALLS and engine.channel.added[1].grammar is None


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "input[0].call_id"),
        (
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"},
            "input[0].arguments",
        ),
        ({"type": "function_call_output", "call_id": "1"}, "input[0].output"),
        (
            {"type": "function_call_output", "call_id": "1", "output": "a", "role": "user"},
            "input[0].role",
        ),
        ({"role": "user"}, "input[0].content"),
        ({"content": "a"}, "input[0].role"),
        ({"type": "item_reference", "id": "a"}, "input[0].type"),
    ],
    ids=str,
)
def test_an_item_that_is_none_is_refused_by_its_field(
    item: Any, param: str, client: openai.OpenAI
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=MODEL, input=[item])
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"previous_response_id": "resp-1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_by_name(
    given: Any, param: str, client: openai.OpenAI
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**{"model": MODEL, "input": "a", **given})
    assert refused.value.param == param and refused.value.code == "unsupported_field"
