"""Structured outputs, as clients of OpenAI's and vLLM's APIs ask for them.

The fake device samples at random from the tokens that the grammar allows, so the grammar alone
makes an answer valid.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

from tests.server.live import ANSWER_S, LiveServer
from tests.server.openai.test_fields import refusal

CHAT: Any = [{"role": "user", "content": "hi"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Bern", "Ulm"]},
        "days": {"type": "integer", "maximum": 14, "minimum": 1},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("weather", "trip")
]
PARSERS = ("hermes", "qwen3", "llama3_json", "mistral")


class Place(pydantic.BaseModel):
    city: Literal["Bern", "Ulm"]
    days: int = pydantic.Field(ge=1, le=14)
    note: str | None = pydantic.Field(max_length=5)


class ParsingServer(LiveServer):
    """A server with a parser of tool calls."""

    parser: str


@pytest.fixture(scope="module", params=PARSERS)
def tools_server(request: pytest.FixtureRequest, fake_model: str) -> Iterator[ParsingServer]:
    with ParsingServer(
        fake_model,
        "--served-model-name",
        "fake",
        "--device",
        "fake",
        "--tool-call-parser",
        request.param,
    ) as server:
        server.parser = request.param
        yield server


@pytest.fixture(scope="module")
def reasoning_server(fake_model: str) -> Iterator[LiveServer]:
    with LiveServer(
        fake_model, "--served-model-name", "fake", "--device", "fake", "--reasoning-parser", "qwen3"
    ) as server:
        yield server


def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=ANSWER_S
    )


def ask(server: LiveServer, **options: Any) -> Any:
    with client(server) as api:
        answer = api.chat.completions.create(model="fake", messages=CHAT, **options)
        return list(answer) if options.get("stream") else answer


@pytest.mark.parametrize("strict", [True, False, None])
def test_a_chat_s_json_schema_holds(strict: bool | None, fake: LiveServer) -> None:
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "place", "schema": SCHEMA, "strict": strict},
    }
    whole = ask(fake, response_format=form, n=5, seed=1, max_tokens=400)
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    streamed = "".join(
        chunk.choices[0].delta.content or ""
        for chunk in ask(fake, response_format=form, seed=2, max_tokens=400, stream=True)
    )
    jsonschema.validate(json.loads(streamed), SCHEMA)


def test_the_client_s_helpers_parse_what_comes(fake: LiveServer) -> None:
    with client(fake) as api:
        chat = api.chat.completions.parse(
            model="fake", messages=CHAT, response_format=Place, seed=1, max_tokens=400
        )
        assert isinstance(chat.choices[0].message.parsed, Place)
        response = api.responses.parse(
            model="fake",
            input="hi",
            text_format=Place,
            max_output_tokens=400,
            extra_body={"seed": 1},
        )
        assert isinstance(response.output_parsed, Place)


def test_json_objects_come_as_objects(tiny: LiveServer) -> None:
    """Use the bundled model, which would rather write Python."""
    with client(tiny) as api:
        answer = api.chat.completions.create(
            model="tiny-python",
            messages=CHAT,
            response_format={"type": "json_object"},
            max_tokens=400,
            temperature=1,
            seed=11,
            stop=None,
        )
    choice = answer.choices[0]
    assert choice.message.content is not None and choice.message.content.lstrip().startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "[ab]{3}c"}, "[ab]{3}c"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'start: "x" /[0-9]{2}/'}, "x[0-9]{2}"),
        ({"grammar": 'root ::= "x" [0-9]'}, "x[0-9]"),
        (
            {"json": SCHEMA, "disable_any_whitespace": True},
            r'\{"city":"(Bern|Ulm)","days":(1?[0-9])\}',
        ),
        ({"json": json.dumps({"const": [1]})}, r"\[\s*1\s*\]"),
    ],
    ids=str,
)
def test_the_forms_that_users_of_vllm_know(
    path: str, form: dict[str, Any], pattern: str, fake: LiveServer
) -> None:
    prompt = {"messages": CHAT} if "chat" in path else {"prompt": "hi"}
    answer = fake.post(path, {**prompt, "structured_outputs": form, "max_tokens": 300, "n": 3})
    assert answer.status_code == 200, answer.text
    for choice in answer.json()["choices"]:
        text = choice["message"]["content"] if "chat" in path else choice["text"]
        assert re.fullmatch(pattern, text), text
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)


@pytest.mark.parametrize("stream", [False, True])
def test_required_calls_come(stream: bool, tools_server: LiveServer) -> None:
    message, reason = _message(
        tools_server, stream, tools=TOOLS, tool_choice="required", seed=5, max_tokens=1500
    )
    assert reason == "tool_calls" and not message["content"]
    assert 1 <= len(message["calls"]) <= 16
    for name, arguments in message["calls"]:
        assert name in ("weather", "trip")
        jsonschema.validate(json.loads(arguments), SCHEMA)


@pytest.mark.parametrize("stream", [False, True])
def test_the_chosen_function_is_called_once(stream: bool, tools_server: LiveServer) -> None:
    choice = {"type": "function", "function": {"name": "trip"}}
    message, _ = _message(
        tools_server, stream, tools=TOOLS, tool_choice=choice, seed=5, max_tokens=400
    )
    ((name, arguments),) = message["calls"]
    assert name == "trip" and not message["content"]
    jsonschema.validate(json.loads(arguments), SCHEMA)


def test_the_client_s_helpers_parse_the_arguments_of_calls(tools_server: LiveServer) -> None:
    with client(tools_server) as api:
        chat = api.chat.completions.parse(
            model="fake",
            messages=CHAT,
            tools=[openai.pydantic_function_tool(Place)],
            tool_choice="required",
            seed=5,
            max_tokens=1500,
        )
    for call in chat.choices[0].message.tool_calls or ():
        assert isinstance(call.function.parsed_arguments, Place)
    assert chat.choices[0].message.tool_calls


def _message(server: LiveServer, stream: bool, **options: Any) -> tuple[dict[str, Any], str]:
    answer = ask(server, stream=stream, **options)
    if not stream:
        (choice,) = answer.choices
        calls = [
            (call.function.name, call.function.arguments)
            for call in choice.message.tool_calls or ()
        ]
        return {"content": choice.message.content, "calls": calls}, choice.finish_reason
    content, made, reason = "", list[list[str]](), ""
    for chunk in answer:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            if call.index == len(made):
                made.append([call.function.name, ""])
            made[call.index][1] += call.function.arguments or ""
        reason = choice.finish_reason or reason
    return {"content": content, "calls": [tuple(call) for call in made]}, reason


def test_strict_functions_are_taken_where_their_calls_can_be_told_from_text(
    tools_server: ParsingServer,
) -> None:
    strict = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}]
    body = {"messages": CHAT, "tools": strict, "max_tokens": 5}
    if tools_server.parser in ("hermes", "qwen3"):
        assert tools_server.post("/v1/chat/completions", body).status_code == 200
    else:
        error = refusal(tools_server, "/v1/chat/completions", body)
        assert (error["param"], error["code"]) == ("tools", "unsupported_field")


ANSWER: dict[str, Any] = {
    "type": "object",
    "properties": {"sunny": {"type": "boolean"}},
    "required": ["sunny"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}},
        {"type": "json_object"},
    ],
    ids=["schema", "object"],
)
def test_an_answer_with_tools_calls_them_or_has_its_form(
    form: dict[str, Any], tools_server: LiveServer
) -> None:
    """The fake device chooses at random between calls and the form."""
    kinds = set()
    for choice in ask(
        tools_server, tools=TOOLS, response_format=form, n=24, seed=3, max_tokens=400
    ).choices:
        kinds.add(choice.finish_reason)
        if choice.finish_reason == "tool_calls":
            assert not choice.message.content and choice.message.tool_calls
            for call in choice.message.tool_calls:
                jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
        elif choice.finish_reason == "stop":
            answer = json.loads(choice.message.content)
            jsonschema.validate(
                answer, ANSWER if form["type"] == "json_schema" else {"type": "object"}
            )
    assert "stop" in kinds


def test_required_calls_come_before_the_form(tools_server: LiveServer) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}
    message, reason = _message(
        tools_server,
        False,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        response_format=form,
        seed=5,
        max_tokens=1500,
    )
    assert reason == "tool_calls" and len(message["calls"]) == 1


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (
            {"tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
        ),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"structured_outputs": {"regex": "a"}}, "tools"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"type": "thing"}}}
                ],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
    ids=str,
)
def test_wrong_choices_of_tools_are_refused_by_name(
    given: dict[str, Any], param: str, tools_server: LiveServer
) -> None:
    assert (
        refusal(tools_server, "/v1/chat/completions", {"messages": CHAT, "tools": TOOLS, **given})[
            "param"
        ]
        == param
    )


def test_the_form_holds_after_the_reasoning(reasoning_server: LiveServer) -> None:
    """The device reasons at random, or not at all; the answer has the form in any case."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    answer = ask(reasoning_server, response_format=form, n=24, seed=1, max_tokens=200)
    kinds = set()
    for choice in answer.choices:
        kinds.add(choice.finish_reason)
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content), SCHEMA)
        else:
            assert not choice.message.content, "it has reasoned to the end"
    assert kinds == {"stop", "length"}


HOSTILE: dict[str, Any] = {
    "deep": json.loads('{"items":' * 70 + "{}" + "}" * 70),
    "large": {"enum": [f"value {i}" for i in range(10_000)]},
    "no schema": {"type": "thing"},
    "unknown keyword": {"type": "array", "uniqueItems": True},
    "options": {"type": "object", "x-guidance": {"lenient": True}},
    "nothing fits": {"enum": []},
    "elsewhere": {"$ref": "http://127.0.0.1:1/schema.json"},
    "factors": {"type": "integer", "multipleOf": 9999991, "minimum": 1, "maximum": 10**18},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_schemas_that_cannot_be_are_refused_by_the_field_they_came_in(
    name: str, fake: LiveServer
) -> None:
    schema = HOSTILE[name]
    cases = [
        (
            "/v1/chat/completions",
            {"messages": CHAT},
            "response_format.json_schema.schema",
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": schema},
                }
            },
        ),
        (
            "/v1/completions",
            {"prompt": "a"},
            "structured_outputs.json",
            {"structured_outputs": {"json": schema}},
        ),
        (
            "/v1/responses",
            {"input": "a"},
            "text.format.schema",
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}},
        ),
    ]
    for path, body, param, given in cases:
        error = refusal(fake, path, {**body, **given})
        assert error["param"] == param and error["message"].startswith(f"{param}: "), error


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar"),
        (
            {"structured_outputs": {"structural_tag": {"triggers": []}}},
            "structured_outputs.structural_tag",
        ),
        ({"structured_outputs": {"magic": 1}}, "structured_outputs.magic"),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
        ),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 1}, "min_tokens"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a b", "schema": {}},
                }
            },
            "response_format.json_schema.name",
        ),
    ],
    ids=str,
)
def test_wrong_forms_are_refused_by_name(
    given: dict[str, Any], param: str, fake: LiveServer
) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/completions", {"prompt": "a"}),
    ):
        error = refusal(fake, path, {**body, "max_tokens": 9, **given})
        assert error["param"] == param, error


def test_plain_streams_go_on_beside_hostile_grammars(fake: LiveServer) -> None:
    """Run grammars at the bounds of compilation and of a token's cost.

    The stream beside them neither stops nor changes, and the server is idle at the end.
    """
    hostile = [
        {"regex": "(.*a.{20}){1,100}"},
        {"regex": "((a{1,1000}){1,1000}){1,1000}"},
        {
            "json": {
                "type": "object",
                "properties": {f"p{i}": {"type": "string"} for i in range(1500)},
            }
        },
        {"grammar": 'start: s\ns: s s | "a" |'},
    ]
    plain = {"prompt": "a", "max_tokens": 200, "seed": 3, "ignore_eos": True, "temperature": 1}
    expected = fake.post("/v1/completions", plain).json()["choices"][0]["text"]
    with client(fake) as api:
        stream = api.completions.create(
            model="fake",
            stream=True,
            extra_body={"ignore_eos": True},
            prompt="a",
            max_tokens=200,
            seed=3,
            temperature=1,
        )
        text = next(stream).choices[0].text
        beside = [
            fake.post(
                "/v1/completions", {"prompt": "a", "max_tokens": 20, "structured_outputs": form}
            )
            for form in hostile
        ]
        text += "".join(chunk.choices[0].text for chunk in stream)
    assert text == expected
    assert all(answer.status_code in (200, 400) for answer in beside), [
        answer.text for answer in beside
    ]
    fake.until_idle()
