"""Render a conversation as the model's prompt, by its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sidestep.frontend.input.template_files import Message
from sidestep.frontend.server.service.service import Service
from sidestep.frontend.server.transport.errors import refused

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_OWN_VARIABLES = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
)


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Fields of a request that change the prompt, beside its messages."""

    variables: Mapping[str, Any] | None = None
    """Further variables for the template, from the field chat_template_kwargs."""
    tools: Sequence[Any] | None = None
    effort: Effort | None = None
    effort_field: str = "reasoning_effort"
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


def render(service: Service, messages: Sequence[Message], options: PromptOptions) -> str:
    """Return the prompt of a conversation. Raises ApiError and ValidationError."""
    variables: dict[str, Any] = dict(options.variables or {})
    for name in _OWN_VARIABLES:
        if name in variables:
            raise refused(f"chat_template_kwargs.{name}", "is set by the request's other fields")
    if options.tools:
        variables["tools"] = options.tools
    if options.effort is not None:
        variables = _effort(service, options) | variables
    goes_on = bool(options.continue_final_message)
    begins = not goes_on if options.add_generation_prompt is None else options.add_generation_prompt
    return service.llm.get_tokenizer().render_chat(
        messages, add_generation_prompt=begins, continue_final_message=goes_on, **variables
    )


def _effort(service: Service, options: PromptOptions) -> dict[str, Any]:
    """Return the template's variables for the request's reasoning effort. Raises ApiError."""
    known = service.llm.get_tokenizer().template_variables(options.tools)
    if "reasoning_effort" in known:
        return {"reasoning_effort": options.effort}
    if "enable_thinking" in known:
        return {"enable_thinking": options.effort != "none"}
    if options.effort == "none" and service.args.reasoning_parser is None:
        return {}  # the model does not reason
    raise refused(
        options.effort_field,
        "this model's chat template has neither reasoning_effort nor enable_thinking",
        "unsupported_field",
    )
