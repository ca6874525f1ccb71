"""Convert the fields that demand a form of the answer to the engine's StructuredOutputsParams.

Errors name the request's own field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from sidestep.frontend.api.async_llm import AsyncLLM
from sidestep.frontend.input.output_form import literal, schema_with_options
from sidestep.frontend.parsers.events import Function, ReasoningParser, ToolParser
from sidestep.frontend.server.transport.errors import ApiError, refused
from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.params.structured_outputs_params import StructuredOutputsParams

SchemaName = Annotated[str, msgspec.Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Form of an answer, as in vLLM. Exactly one of the first six fields is given."""

    # See ipc/params/structured_outputs_params.py.

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool | None = None


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Form of any text."""


class JsonObjectFormat(
    msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="json_object"
):
    """Form of any JSON object."""


class NamedSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """JSON schema. The answer keeps to it, whatever `strict` is."""

    name: SchemaName
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(
    msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="json_schema"
):
    """Form of JSON that a schema describes."""

    json_schema: NamedSchema


class FlatSchemaFormat(
    NamedSchema, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"
):
    """Form of JSON that a schema describes, as /v1/responses writes it."""


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat
TextConfigFormat = TextFormat | JsonObjectFormat | FlatSchemaFormat


@dataclass(frozen=True)
class Form:
    """Form that an answer must have."""

    params: StructuredOutputsParams
    field: str | None
    """Request's field that demands it; None if the engine's field has the same name."""

    async def check(self, llm: AsyncLLM) -> None:
        """Raise ApiError if the form cannot be compiled."""
        try:
            await llm.check_structured_outputs(self.params)
        except ValidationError as error:
            raise self.refusal(error) from None

    def refusal(self, error: ValidationError) -> ApiError:
        """Return an engine's error as the error of the request's field."""
        return refused(self.field or error.field, str(error).partition(": ")[2])


def make_form(field: str | None, **given: Any) -> Form:
    """Return the form with these parameters of the engine. Raises ApiError."""
    try:
        return Form(StructuredOutputsParams(**given), field)
    except ValidationError as error:
        raise refused(field or error.field, str(error).partition(": ")[2]) from None


def form_of(
    response_format: ResponseFormat | None, structured: StructuredOutputs | None
) -> Form | None:
    """Return the form that one of these two fields demands; None if neither does.

    Raises ApiError.
    """
    form = _form_of_format(response_format, "response_format", "response_format.json_schema.schema")
    if structured is None:
        return form
    if form is not None:
        raise refused(
            "structured_outputs",
            "cannot go with response_format: one of them says what the answer is",
        )
    given = {
        name: value
        for name in structured.__struct_fields__
        if (value := getattr(structured, name)) is not None
    }
    return make_form(None, **given)


def form_of_text(text_format: TextConfigFormat | None) -> Form | None:
    """Return the form that a request to /v1/responses demands; None if any text will do.

    Raises ApiError.
    """
    return _form_of_format(text_format, "text.format", "text.format.schema")


def _form_of_format(
    given: ResponseFormat | TextConfigFormat | None, field: str, schema_field: str
) -> Form | None:
    if isinstance(given, JsonObjectFormat):
        return make_form(field, json_object=True)
    if isinstance(given, JsonSchemaFormat):
        return make_form(schema_field, json=given.json_schema.schema)
    if isinstance(given, FlatSchemaFormat):
        return make_form(schema_field, json=given.schema)
    return None


def form_of_calls(
    parser: type[ToolParser],
    functions: Sequence[Function],
    most: int,
    special_tokens: Mapping[str, int],
) -> Form:
    """Return the form of one to `most` calls of these functions, and nothing else.

    Raises ApiError.
    """
    return make_form(
        "tools", grammar=parser.grammar(functions, most, lambda text: literal(text, special_tokens))
    )


def calls_or_answer(calls: Form, answer: Form) -> Form:
    """Return the form of an answer that either makes calls or is JSON. Raises ApiError."""
    params, grammar = answer.params, calls.params.grammar
    if params.kind not in ("json", "json_object"):
        raise refused(
            "tools",
            f"cannot go with structured_outputs.{params.kind}, which leaves no place for calls; "
            "send tool_choice 'none'",
            "unsupported_field",
        )
    assert grammar is not None
    schema = schema_with_options(
        params.json_schema,
        answer.field or "structured_outputs.json",
        spaced=not params.disable_any_whitespace,
    )
    return make_form(
        answer.field,
        grammar="\n".join(
            [
                "start: calls | answer",
                f"answer: %json {json.dumps(schema, ensure_ascii=False)}",
                grammar.replace("start:", "calls:", 1),
            ]
        ),
    )


def form_of_strict_tools(parser: type[ToolParser], functions: Sequence[Function]) -> Form:
    """Return the form of an answer with or without calls, which keep to their schemas.

    Raises ApiError.
    """
    tag = parser.structural_tag(functions)
    if tag is None:
        raise refused(
            "tools",
            "strict functions need tool_choice 'required' or a named one: how this model's calls "
            "begin does not tell them from text",
            "unsupported_field",
        )
    return make_form("tools", structural_tag=tag)


def after_reasoning(form: Form, reasoning: ReasoningParser | None) -> Form:
    """Return the form for the text after the reasoning; the reasoning itself has no form."""
    if reasoning is None or reasoning.marks is None:
        return form
    begin, end = reasoning.marks
    return Form(
        msgspec.structs.replace(form.params, reasoning_begin=begin, reasoning_end=end), form.field
    )
