"""The form that an answer must have: what requests say of it, as the engine takes it, with errors
by the request's own field.
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
    """As users of vLLM know it: exactly one of the first six. See ipc.structured_outputs."""

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool | None = None


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Any text."""


class JsonObjectFormat(
    msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="json_object"
):
    """Any JSON object."""


class NamedSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A JSON schema. The answer keeps to it, strict or not."""

    name: SchemaName
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(
    msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="json_schema"
):
    """JSON that a schema describes."""

    json_schema: NamedSchema


class FlatSchemaFormat(
    NamedSchema, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"
):
    """The same, as /v1/responses has it."""


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat
TextConfigFormat = TextFormat | JsonObjectFormat | FlatSchemaFormat


@dataclass(frozen=True)
class Form:
    """What an answer must be."""

    params: StructuredOutputsParams
    field: str | None
    """The request's field that says so; None where the engine's name of it is the request's too."""

    async def check(self, llm: AsyncLLM) -> None:
        """Raises ApiError if it cannot be compiled."""
        try:
            await llm.check_structured_outputs(self.params)
        except ValidationError as error:
            raise self.refusal(error) from None

    def refusal(self, error: ValidationError) -> ApiError:
        """What is wrong, by the request's field."""
        return refused(self.field or error.field, str(error).partition(": ")[2])


def make_form(field: str | None, **given: Any) -> Form:
    """Raises ApiError."""
    try:
        return Form(StructuredOutputsParams(**given), field)
    except ValidationError as error:
        raise refused(field or error.field, str(error).partition(": ")[2]) from None


def form_of(
    response_format: ResponseFormat | None, structured: StructuredOutputs | None
) -> Form | None:
    """The form that one of these two fields asks for. Raises ApiError."""
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
    """The form that /v1/responses is asked for. Raises ApiError."""
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
    """From one to `most` calls of these functions, and nothing else. Raises ApiError."""
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
    """An answer with or without calls, which keep to their schemas. Raises ApiError."""
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
    """The form holds for the answer; what the model reasons before it is free."""
    if reasoning is None or reasoning.marks is None:
        return form
    begin, end = reasoning.marks
    return Form(
        msgspec.structs.replace(form.params, reasoning_begin=begin, reasoning_end=end), form.field
    )
