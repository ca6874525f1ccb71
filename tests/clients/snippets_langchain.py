"""Calls by LangChain, as authors of applications write them.

Each function is one snippet; see snippets_openai.
"""

from __future__ import annotations

import os
from typing import Any, Literal

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import JsonOutputParser, StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

from tests.clients.addresses import MODEL, SCRIPTED

URL = os.environ["OPENAI_BASE_URL"]
llm = ChatOpenAI(
    model=MODEL, base_url=URL, api_key="none", max_tokens=8, temperature=0, stream_usage=True
)
scripted = ChatOpenAI(model="scripted", base_url=SCRIPTED, api_key="none")


@tool
def get_weather(city: Literal["Bern", "Ulm"]) -> str:
    """Return the weather in a city."""
    return f"21 degrees in {city}"


class Verdict(BaseModel):
    """A verdict on a text."""

    good: bool = Field(description="whether it is good")
    kind: Literal["code", "prose"]


# Calls.


def invoke_with_text() -> None:
    message = llm.invoke("def hello(")
    assert isinstance(message, AIMessage) and isinstance(message.content, str)
    assert message.usage_metadata is not None and message.usage_metadata["output_tokens"] <= 8


def invoke_with_messages() -> None:
    message = llm.invoke(
        [
            SystemMessage("You write Python."),
            HumanMessage("import os"),
            AIMessage("import sys"),
            HumanMessage("import re"),
        ]
    )
    assert message.response_metadata["finish_reason"] in ("stop", "length")


def invoke_with_tuples() -> None:
    assert llm.invoke([("system", "Be brief."), ("human", "def f(")]).content is not None


def stream_of_text() -> None:
    whole: Any = None
    for chunk in llm.stream("for i in"):
        whole = chunk if whole is None else whole + chunk
    assert whole.content and whole.usage_metadata["total_tokens"] > 0


async def astream_of_text() -> None:
    assert "".join([str(chunk.content) async for chunk in llm.astream("class A")])


async def ainvoke_and_abatch() -> None:
    assert (await llm.ainvoke("a")).content is not None
    assert len(await llm.abatch(["a", "b", "c"])) == 3


def batch_of_prompts() -> None:
    assert len(llm.batch(["a", "b", "c", "d"], config={"max_concurrency": 2})) == 4


async def events_of_a_stream() -> None:
    kinds = [event["event"] async for event in llm.astream_events("a", version="v2")]
    assert kinds[0] == "on_chat_model_start" and kinds[-1] == "on_chat_model_end"


def a_chain_of_prompt_and_parser() -> None:
    chain = (
        ChatPromptTemplate.from_messages([("system", "You write {language}."), ("human", "{task}")])
        | llm
        | StrOutputParser()
    )
    assert isinstance(chain.invoke({"language": "Python", "task": "a loop"}), str)


def a_chain_with_json_mode() -> None:
    schema = {
        "title": "Verdict",
        "type": "object",
        "properties": {"good": {"type": "boolean"}},
        "required": ["good"],
        "additionalProperties": False,
    }
    bound = llm.bind(
        max_tokens=1000,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "verdict", "schema": schema},
        },
    )
    assert (bound | JsonOutputParser()).invoke("Is it good?")["good"] in (True, False)


def the_older_completions() -> None:
    older = OpenAI(model=MODEL, base_url=URL, api_key="none", max_tokens=6)
    assert isinstance(older.invoke("def get_name("), str)
    assert len(older.generate(["a", "b"]).generations) == 2
    assert "".join(older.stream("import "))


def every_parameter_of_the_constructor() -> None:
    made = ChatOpenAI(
        model=MODEL,
        base_url=URL,
        api_key="none",
        max_tokens=4,
        temperature=0.5,
        top_p=0.9,
        seed=3,
        n=1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        stop_sequences=["\n\n"],
        timeout=60,
        max_retries=1,
        logprobs=True,
        top_logprobs=2,
        metadata={"job": "a"},
        model_kwargs={"user": "me"},
        extra_body={"top_k": 10},
    )
    assert made.invoke("def f(").response_metadata["logprobs"]["content"]


def two_choices() -> None:
    made = ChatOpenAI(model=MODEL, base_url=URL, api_key="none", max_tokens=4, n=2, temperature=0.8)
    assert len(made.generate([[HumanMessage("a")]]).generations[0]) == 2


# Forms.


def structured_output_by_schema() -> None:
    made = llm.with_structured_output(Verdict)
    assert isinstance(made.invoke("Is it good?", max_tokens=1000), Verdict)


def structured_output_by_a_dict() -> None:
    long = ChatOpenAI(model=MODEL, base_url=URL, api_key="none", max_tokens=1000, temperature=0)
    schema = Verdict.model_json_schema() | {"additionalProperties": False}
    made = long.with_structured_output(schema, method="json_schema", include_raw=True)
    answer: Any = made.invoke("Is it good?")
    assert answer["parsed"].keys() == {"good", "kind"} and answer["parsing_error"] is None


def structured_output_by_a_function() -> None:
    made = scripted.with_structured_output(Verdict, method="function_calling")
    assert made.invoke("Is it good?") == Verdict(good=True, kind="code")


# Tools.


def bind_tools_and_loop() -> None:
    bound = scripted.bind_tools([get_weather])
    messages: list[Any] = [HumanMessage("What is the weather in Bern?")]
    for _ in range(4):
        message = bound.invoke(messages)
        messages.append(message)
        if not message.tool_calls:
            break
        messages += [get_weather.invoke(call) for call in message.tool_calls]
    assert [type(message) for message in messages] == [
        HumanMessage,
        AIMessage,
        ToolMessage,
        AIMessage,
    ]
    assert messages[-1].content == "It is 21 degrees in Bern."


def bind_tools_without_parallel_calls() -> None:
    bound = llm.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False)
    (call,) = bound.invoke("the weather", max_tokens=1000).tool_calls
    assert call["name"] == "get_weather"


def a_tool_chosen_by_name() -> None:
    bound = scripted.bind_tools([get_weather], tool_choice="get_weather")
    assert bound.invoke("the weather").tool_calls[0]["args"] == {"city": "Bern"}


async def a_streamed_call() -> None:
    whole: Any = None
    async for chunk in scripted.bind_tools([get_weather]).astream("the weather in Bern"):
        whole = chunk if whole is None else whole + chunk
    assert whole.tool_calls[0]["name"] == "get_weather" and whole.tool_calls[0]["args"] == {
        "city": "Bern"
    }


def the_responses_api() -> None:
    made = ChatOpenAI(
        model=MODEL, base_url=URL, api_key="none", max_tokens=8, use_responses_api=True
    )
    assert made.invoke("def f(").text
    assert "".join(chunk.text for chunk in made.stream("def f("))


def a_tool_loop_over_the_responses_api() -> None:
    bound = ChatOpenAI(
        model="scripted", base_url=SCRIPTED, api_key="none", use_responses_api=True
    ).bind_tools([get_weather])
    first = bound.invoke("What is the weather in Bern?")
    outputs = [get_weather.invoke(call) for call in first.tool_calls]
    last = bound.invoke([HumanMessage("What is the weather in Bern?"), first, *outputs])
    assert outputs and last.text == "It is 21 degrees in Bern."


# Errors.


def a_prompt_that_is_too_long() -> None:
    import openai

    try:
        llm.invoke("word " * 3000)
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded"
    else:
        raise AssertionError("served")
