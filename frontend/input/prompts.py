"""The forms of a prompt, and how each is read.

A prompt is text, token ids, chat messages, or a dict with one of these and its options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict, cast

from sidestep.frontend.input.prompt_limit import PromptLimit
from sidestep.frontend.input.template_files import Message
from sidestep.frontend.input.tokenizer import Tokenizer
from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.vllm.calls import PROMPT_KEYS
from sidestep.ipc.vllm.foreign import translate
from sidestep.ipc.vllm.params import plain


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]
    """See AsyncLLM.generate."""


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    """The text that the ids were made of.

    Outputs show it; only the ids are computed.
    """
    cache_salt: NotRequired[str]


class ChatPrompt(TypedDict):
    """A prompt as a conversation, with the arguments of its template."""

    messages: Sequence[Message]
    tools: NotRequired[Sequence[Mapping[str, Any]] | None]
    """Descriptions of functions, in the form of OpenAI's API."""
    chat_template: NotRequired[str | None]
    """A template in Jinja that replaces the model's own."""
    chat_template_kwargs: NotRequired[Mapping[str, Any] | None]
    """Further variables of the template, such as {"enable_thinking": False}."""
    add_generation_prompt: NotRequired[bool]
    """Whether the prompt ends with the beginning of an answer; true by default."""
    continue_final_message: NotRequired[bool]
    """Whether the prompt ends inside the last message, which the output then continues."""
    cache_salt: NotRequired[str]


Prompt = (
    str
    | Sequence[int]
    | Sequence[Message]
    | TextPrompt
    | TokensPrompt
    | ChatPrompt
    | Mapping[str, Any]
)
"""Text, token ids, chat messages, or one of the dicts."""

_CHAT_KEYS = ChatPrompt.__annotations__.keys() - {"messages", "cache_salt"}


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """A prompt in the form in which it is sent: its text, its token ids, or both.

    If both are there, the ids are computed.
    """

    text: str | None = None
    ids: list[int] | None = None
    add_special_tokens: bool = True
    """Whether to add the special tokens that the model puts around every text."""
    cache_salt: str | None = None


def read_prompt(prompt: object, tokenizer: Tokenizer, limit: PromptLimit) -> ReadPrompt:
    """Return the parts of a prompt; raises ValidationError, which names the wrong part.

    limit: a list of more token ids is refused before its entries are read.
    """
    if isinstance(prompt, str):
        return ReadPrompt(prompt)
    if isinstance(prompt, Mapping):
        return _read_dict(prompt, tokenizer, limit)
    if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
        return _read_chat({"messages": prompt}, tokenizer)
    return ReadPrompt(ids=_read_ids("prompt", prompt, limit))


def _read_dict(given: Mapping[str, Any], tokenizer: Tokenizer, limit: PromptLimit) -> ReadPrompt:
    prompt = translate(given, PROMPT_KEYS)
    if "messages" in prompt:
        return _read_chat(prompt, tokenizer)
    if not prompt.keys() & {"prompt", "prompt_token_ids"} or not prompt.keys() <= {
        "prompt",
        "prompt_token_ids",
        "cache_salt",
    }:
        raise ValidationError(
            "prompt",
            "a dict must have 'prompt', 'prompt_token_ids' or 'messages', not "
            f"{', '.join(map(repr, sorted(map(str, prompt)))) or 'nothing'}",
        )
    text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
    if not isinstance(text, str) and (text is not None or ids is None):
        raise ValidationError("prompt", f"must be text, not {type(text).__name__}")
    if ids is None:
        return ReadPrompt(text, cache_salt=salt)
    return ReadPrompt(text, _read_ids("prompt_token_ids", ids, limit), cache_salt=salt)


def _read_chat(prompt: Mapping[str, Any], tokenizer: Tokenizer) -> ReadPrompt:
    chat = dict(prompt)
    messages, salt = chat.pop("messages"), chat.pop("cache_salt", None)
    if unknown := sorted(map(str, chat.keys() - _CHAT_KEYS)):
        raise ValidationError(
            "prompt",
            f"a dict with 'messages' may have {', '.join(sorted(_CHAT_KEYS))}, not "
            f"{', '.join(unknown)}",
        )
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise ValidationError(
            "messages", f"must be a list of messages, not {type(messages).__name__}"
        )
    variables = chat.pop("chat_template_kwargs", None) or {}
    if not isinstance(variables, Mapping):
        raise ValidationError(
            "chat_template_kwargs", f"must be a dict, not {type(variables).__name__}"
        )
    for name in variables:
        if name in _CHAT_KEYS or name == "messages":
            raise ValidationError(
                "chat_template_kwargs", f"may not hold {name!r}, which is an argument of its own"
            )
    _check_tools(chat.get("tools"))
    # The template writes the special tokens itself.
    return ReadPrompt(
        tokenizer.render_chat(messages, **chat, **variables),
        add_special_tokens=False,
        cache_salt=salt,
    )


def _check_tools(tools: object) -> None:
    if tools is None:
        return
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ValidationError("tools", f"must be a list of dicts, not {type(tools).__name__}")
    for tool in tools:
        if not isinstance(tool, Mapping):
            raise ValidationError(
                "tools",
                f"holds {type(tool).__name__}; each must be a dict of the form "
                "{'type': 'function', 'function': {'name': ..., 'parameters': ...}}",
            )


def _read_ids(field: str, given: object, limit: PromptLimit) -> list[int]:
    if hasattr(given, "tolist"):  # an array of numpy or a tensor
        given = given.tolist()
    # bytes are a sequence of numbers too, but never token ids.
    if not isinstance(given, Sequence) or isinstance(given, str | bytes | bytearray | memoryview):
        allowed = (
            "text, a list of token ids, or a list of chat messages"
            if field == "prompt"
            else "a list"
        )
        raise ValidationError(field, f"must be {allowed}, not {type(given).__name__}")
    limit.check(len(given))  # before each entry is read
    if set(map(type, given)) <= {int}:  # without a look at each entry in Python
        return list(given)
    ids = cast(list[object], plain(list(given)))
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool):
            raise ValidationError(field, f"holds {token!r}, which is not a token id")
    return list(cast(list[int], ids))
