"""What the requests that generate text have in common, and the fields that are known but do nothing yet.

A field that is known is declared, so that the OpenAPI document has it. One that the engine does not implement is in
NOT_YET: it may be left out, be null or have its neutral value, and anything else is refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from sidestep.frontend.server.errors import refused
from sidestep.ipc.sampling_params import MAX_SEED, SamplingParams

MAX_N = 128
"""Choices of one prompt, as in OpenAI's API."""
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
"""Of all stop strings together: each new token is held against all their beginnings."""
_DERIVE = 0x9E3779B97F4A7C15

Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Natural = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Stop = Annotated[str, msgspec.Meta(min_length=1)]

NOT_YET: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "structured_outputs": (),
    "best_of": (1,),
    "suffix": (),
    "response_format": ({"type": "text"},),
    "functions": (),
    "function_call": (),
    "parallel_tool_calls": (True,),
    "reasoning_effort": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "safety_identifier": (),
    "prompt_cache_key": (),
    "user": (),
}
"""Known field -> its neutral values, besides null. `logprobs` is a switch of chats and a number of completions, where 0
already asks for some."""


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How a stream is told."""

    include_usage: bool = False
    """A last event with the counts of tokens."""
    continuous_usage_stats: bool = False
    """With include_usage: every event of a choice has that choice's counts so far."""
    include_obfuscation: Any = None


class SamplingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of every request that generates text; null is the same as leaving one out."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_N)] | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEED)] | None = None
    stop: Stop | Annotated[list[Stop], msgspec.Meta(max_length=MAX_STOPS)] | None = None
    # As users of vLLM know them.
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    min_tokens: Natural | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Natural], msgspec.Meta(max_length=128)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31) + 1, le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    deadline_ms: Count | None = None
    """Milliseconds after which the request ends with what it has; its choices say so."""
    # Not implemented: see NOT_YET.
    frequency_penalty: Any = None
    presence_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Any = None
    logprobs: Any = None
    prompt_logprobs: Any = None
    structured_outputs: Any = None
    response_format: Any = None
    user: Any = None


_ENGINE_FIELDS = ("temperature", "top_p", "top_k", "min_p", "min_tokens", "seed", "stop", "ignore_eos",
                  "stop_token_ids", "skip_special_tokens", "include_stop_str_in_output")


def refuse_not_yet(request: msgspec.Struct, table: Mapping[str, tuple[Any, ...]] = NOT_YET) -> None:
    """Raises ApiError for a field that would do nothing."""
    for name in request.__struct_fields__:
        if (neutral := table.get(name)) is not None:
            refuse_unless(name, getattr(request, name), *neutral)
    options = getattr(request, "stream_options", None)
    if isinstance(options, StreamOptions):
        if not getattr(request, "stream", False):
            raise refused("stream_options", "has a meaning only with stream: true")
        if options.continuous_usage_stats and not options.include_usage:
            raise refused("stream_options.continuous_usage_stats", "has a meaning only with include_usage: true")
        refuse_unless("stream_options.include_obfuscation", options.include_obfuscation, False)


def refuse_unless(name: str, value: object, *neutral: object) -> None:
    """Raises ApiError unless the value is null or one of `neutral`; True is not 1 here."""
    if value is None or any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral):
        return
    allowed = " or ".join(msgspec.json.encode(n).decode() for n in neutral)
    raise refused(name, "is not supported by this server; leave it out" + (f" or send {allowed}" if allowed else ""),
                  "unsupported_field")


def sampling_params(request: msgspec.Struct, max_tokens: int | None, **more: Any) -> SamplingParams:
    """As the engine takes them. Raises ValidationError, and ApiError for stop strings beyond the bound."""
    given = {name: value for name in _ENGINE_FIELDS if (value := getattr(request, name, None)) is not None}
    stops = given.get("stop", ())
    if sum(map(len, [stops] if isinstance(stops, str) else stops)) > MAX_STOP_CHARACTERS:
        raise refused("stop", f"has more than {MAX_STOP_CHARACTERS} characters altogether")
    return SamplingParams(**{**given, "max_tokens": max_tokens, **more})


def for_choice(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of one of several choices: its own seed, the given one for the first."""
    if index == 0 or params.seed is None:
        return params
    return msgspec.structs.replace(params, seed=(params.seed ^ (index * _DERIVE)) & MAX_SEED)
