"""Chat templates, which turn a conversation into a prompt, and the checks before they run.

The jinja2 environment is the one that templates on the hub are written for. A template is a program
that came with the model, so it runs in jinja2's sandbox. An error that it raises is reported as an
error of the messages, not of the engine.
"""

from __future__ import annotations

import datetime
import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from sidestep.frontend.input.template_files import Message
from sidestep.ipc.common.errors import ValidationError


def read_chat_template(given: str) -> str:
    """Return the source of the template that the option chat_template gives.

    given: a file, or a template itself. Raises ValidationError, also for a template that is not
    valid.
    """
    source = given
    if not any(mark in given for mark in ("{{", "{%", "{#")):
        try:
            source = Path(given).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            problem = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ValidationError(
                "chat_template", f"{given!r} is no template, and no file to read: {problem}"
            ) from None
    ChatTemplate(source, {})
    return source


class ChatTemplate:
    """One compiled template; raises ValidationError if it cannot be compiled."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(
                jinja2.meta.find_undeclared_variables(environment.parse(source))
            )
            """Names of the variables that the template reads."""
        except jinja2.TemplateError as error:
            raise ValidationError("chat_template", f"is not valid: {error}") from None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Return the conversation as a prompt.

        Raises ValidationError when the template refuses the conversation.

        continue_final_message: end the prompt where the last message's text ends, for an output
        that continues it.
        """
        checked = [_check_message(message) for message in messages]
        if not checked:
            raise ValidationError("messages", "is empty")
        if continue_final_message:
            return self._render_to_continue(checked, add_generation_prompt, variables)
        return self._render(checked, add_generation_prompt, variables)

    def _render_to_continue(
        self, messages: list[Message], begins_answer: bool, variables: Mapping[str, Any]
    ) -> str:
        *before, last = messages
        if begins_answer:
            raise ValidationError(
                "continue_final_message",
                "needs add_generation_prompt=False, for the prompt cannot "
                "end in the last message and begin a new one",
            )
        if last.get("tool_calls") or not last.get("content"):
            raise ValidationError(
                "continue_final_message", "needs a last message with text to go on from"
            )
        # The template may put anything behind the text, so a mark shows where the text ends.
        mark = uuid.uuid4().hex
        marked = {**last, "content": last["content"] + mark}
        prompt, found, _ = self._render([*before, marked], False, variables).rpartition(mark)
        if not found:
            raise ValidationError(
                "continue_final_message", "the chat template does not show the last message's text"
            )
        return prompt

    def _render(
        self, checked: list[Message], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        # Templates ask both `tools is defined` and `tools is not none`, so the name must exist with
        # the value None.
        given = {"tools": None, "documents": None, **self._special_tokens, **variables}
        try:
            return self._template.render(
                messages=checked, add_generation_prompt=add_generation_prompt, **given
            )
        except Exception as error:
            raise ValidationError("messages", f"the chat template refuses them: {error}") from None


def _check_message(message: object) -> Message:
    """Return a message as templates expect it.

    A message without a role is an error: it would be rendered as if it had an empty one.
    """
    if not isinstance(message, Mapping):
        raise ValidationError(
            "messages", f"holds {type(message).__name__}, not a dict with role and content"
        )
    if not isinstance(message.get("role"), str):
        raise ValidationError(
            "messages", f"a message's role must be a string, not {message.get('role')!r}"
        )
    if "content" not in message and "tool_calls" not in message:
        raise ValidationError("messages", f"the {message['role']} message has no content")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    return {**message, "content": _join_parts(content)}


def _join_parts(content: object) -> str:
    """Return the text of a content that is a list of parts, as the OpenAI API writes it."""
    if not isinstance(content, Sequence):
        raise ValidationError("messages", f"content must be text, not {type(content).__name__}")
    texts = []
    for part in content:
        if (
            not isinstance(part, Mapping)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            raise ValidationError(
                "messages", "content may hold only parts of the form {'type': 'text', 'text': ...}"
            )
        texts.append(part["text"])
    return "\n".join(texts)


class _GenerationBlock(jinja2.ext.Extension):
    """The block `{% generation %}`, which marks the assistant's part for training.

    Here it is only its content.
    """

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML; a prompt is not HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment
