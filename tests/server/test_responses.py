"""/v1/responses with the openai client: against the bundled model, and a scripted one where its words matter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.live import LiveServer
from tests.server.scripted import scripted_server

MODEL = "tiny-python"


@pytest.fixture
def client(tiny: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_response_is_the_chat_s_answer(client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, instructions="Write Python.", input="def get_name(", temperature=0,
                                   max_output_tokens=20)
    chat = client.chat.completions.create(model=MODEL, temperature=0, max_tokens=20, messages=[
        {"role": "system", "content": "Write Python."}, {"role": "user", "content": "def get_name("}])
    assert made.output_text == chat.choices[0].message.content
    assert made.usage is not None and chat.usage is not None
    assert made.usage.input_tokens == chat.usage.prompt_tokens
    assert made.usage.output_tokens == chat.usage.completion_tokens
    assert made.status == ("completed" if chat.choices[0].finish_reason == "stop" else "incomplete")
    assert made.store is False and made.id.startswith("resp-")


def test_an_answer_that_is_cut_is_incomplete(client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input="a", max_output_tokens=3, extra_body={"ignore_eos": True})
    assert made.status == "incomplete" and made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens" and made.output[0].status == "incomplete"
    late = client.responses.create(model=MODEL, input="a", extra_body={"ignore_eos": True, "deadline_ms": 50})
    assert late.incomplete_details is not None and late.incomplete_details.reason == "deadline"


def test_a_stream_ends_with_the_same_response(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 20,
                               "input": [{"role": "user", "content": [{"type": "input_text", "text": "def f("}]}]}
    whole = client.responses.create(**options)
    events = list(client.responses.create(**options, stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = [e.type for e in events]
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added",
                         "response.content_part.added"]
    assert kinds[-4:] == ["response.output_text.done", "response.content_part.done", "response.output_item.done",
                          f"response.{whole.status}"]
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == events[-4].text == events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens


def test_an_answer_may_be_part_of_the_next_input(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="def f(", max_output_tokens=5, temperature=0)
    items = [{"role": "user", "content": "def f("}, *(item.model_dump() for item in first.output),
             {"role": "user", "content": "more"}]
    items[1] = {k: v for k, v in items[1].items() if k in ("role", "content", "type", "id", "status")}
    second = client.responses.create(model=MODEL, input=items, max_output_tokens=5)
    assert second.usage is not None and first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_an_item_of_its_own(stream: bool, fake_model: str) -> None:
    async with scripted_server(fake_model, reasoning_parser="qwen3") as (engine, client):
        for engine.says, expected in (("<think>Hm.</think>\n\nYes.", [("reasoning", "Hm."), ("message", "Yes.")]),
                                      ("<think>Hm.", [("reasoning", "Hm."), ("message", "")]),
                                      ("", [("message", "")])):
            options: Any = {"model": "scripted", "input": "well?"}
            if stream:
                events = [e async for e in await client.responses.create(**options, stream=True)]
                made = events[-1].response
                done = [e.item for e in events if e.type == "response.output_item.done"]
                assert [d.id for d in done] == [i.id for i in made.output]
                for index, (_, text) in enumerate(expected):
                    assert "".join(e.delta for e in events if e.type.endswith("_text.delta")
                                   and e.output_index == index) == text
            else:
                made = await client.responses.create(**options)
            assert [(i.type, i.content[0].text) for i in made.output] == expected
            assert made.status == "completed"


@pytest.mark.parametrize("field", ["previous_response_id", "tools", "background"])
def test_what_is_not_served_is_refused_by_name(field: str, client: openai.OpenAI) -> None:
    value: Any = {"tools": [{"type": "web_search"}], "background": True}.get(field, "resp-1")
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=MODEL, input="a", **{field: value})
    assert refused.value.param == field and refused.value.code == "unsupported_field"
