"""Fields of all requests that generate text, and checks of fields that are not implemented.

Each known field is declared, so that the OpenAPI document contains it. A field that the engine does
not implement is in NOT_YET. It may be left out, be null or have its neutral value; every other
value is refused with an error that names the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from sidestep.frontend.server.schemas.structure import ResponseFormat, StructuredOutputs
from sidestep.frontend.server.transport.errors import refused
from sidestep.ipc.params.ranges import (
    BIAS,
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_PATTERN,
    MAX_SEED,
    MAX_STOP_TOKEN_IDS,
    MIN_P,
    NUM_LOGPROBS,
    PATTERN_COUNT,
    PATTERN_SIZE,
    PENALTY,
    REPETITION_PENALTY,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)
from sidestep.ipc.params.sampling_params import RepetitionDetectionParams, SamplingParams

MAX_N = 128
"""Largest number of choices of one prompt, as in OpenAI's API."""
MAX_STOPS = 16
"""Largest number of stop strings of one request."""
MAX_STOP_CHARACTERS = 1024
"""Largest number of characters of all stop strings together.

Each new token is compared with the beginnings of all of them."""

Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Natural = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Stop = Annotated[str, msgspec.Meta(min_length=1)]

NOT_YET: dict[str, tuple[Any, ...]] = {
    "suffix": (),
    "functions": (),
    "function_call": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "service_tier": ("auto", "default"),
    "prompt_cache_retention": ("in_memory",),
    "chat_template": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "truncate_prompt_tokens": (),
}
"""Known field -> its neutral values, besides null."""

_ADVICE = {
    "functions": "is the older form of tools; send tools",
    "function_call": "is the older form of tool_choice; send tools and tool_choice",
    "chat_template": "is not taken from requests: a template is a program, and nothing could stop "
    "one that does not end; the server renders with the model's own, which chat_template_kwargs "
    "reach",
    "guided_json": 'is an older name; send structured_outputs: {"json": ...} or response_format',
    "guided_regex": 'is an older name; send structured_outputs: {"regex": ...}',
    "guided_choice": 'is an older name; send structured_outputs: {"choice": [...]}',
    "guided_grammar": 'is an older name; send structured_outputs: {"grammar": ...}',
    "guided_decoding_backend": "names no backend of this server, which has one; leave it out and "
    "send structured_outputs",
    "guided_whitespace_pattern": "is not supported by this server; structured_outputs has "
    "disable_any_whitespace",
}
"""Known field -> the text of its refusal that replaces the general sentence."""


Seed = Annotated[int, msgspec.Meta(ge=-1, le=MAX_SEED)]
"""-1 asks for a random seed, as a request without the field does."""
Temperature = Annotated[float, TEMPERATURE]
TopP = Annotated[float, TOP_P]
TopK = Annotated[int, TOP_K, msgspec.Meta(le=2**31 - 1)]
MinP = Annotated[float, MIN_P]
Penalty = Annotated[float, PENALTY]
NumLogprobs = Annotated[int, NUM_LOGPROBS]
PatternSize = Annotated[int, PATTERN_SIZE, msgspec.Meta(le=MAX_PATTERN)]


class RepetitionDetection(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Rule that ends an answer whose last tokens repeat one pattern at least `min_count` times."""

    max_pattern_size: PatternSize
    min_pattern_size: PatternSize = 1
    min_count: Annotated[int, PATTERN_COUNT] = 3


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of a stream's events."""

    include_usage: bool = False
    """Send a last event with the counts of tokens."""
    continuous_usage_stats: bool = False
    """With include_usage: every event has the counts of its choice so far."""
    include_obfuscation: Any = None


Note = Annotated[str, msgspec.Meta(max_length=512)]
Metadata = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=64)], Note], msgspec.Meta(max_length=16)
]


class ClientFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of every request that generates text, which do not change the text.

    Null means the same as a missing field.
    """

    model: str | None = None
    stream: bool | None = None
    user: Note | None = None
    """Client's name for its user. Traces and logs contain this field and the next three."""
    safety_identifier: Note | None = None
    """Newer name of `user`."""
    prompt_cache_key: Note | None = None
    """Not used by the cache, which finds prefixes by their tokens."""
    metadata: Metadata | None = None
    store: bool | None = None
    """Ignored: answers are never stored."""
    priority: Annotated[int, msgspec.Meta(ge=-(2**31) + 1, le=2**31 - 1)] | None = None
    """Requests with the lowest number run first. Needs --scheduling-policy priority."""
    cache_salt: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    deadline_ms: Count | None = None
    """Milliseconds after which the request ends with the tokens that it has. Its choices then have
    stop_reason "deadline"."""
    # Not implemented: see NOT_YET.
    service_tier: Any = None
    prompt_cache_retention: Any = None

    @property
    def notes(self) -> dict[str, str]:
        """Return the client's notes about the request by name, for traces and logs."""
        named = {name: getattr(self, name) for name in _NOTES}
        return {name: text for name, text in named.items() if text is not None} | {
            f"metadata.{key}": text for key, text in (self.metadata or {}).items()
        }


_NOTES = ("user", "safety_identifier", "prompt_cache_key")


class SamplingFields(ClientFields, kw_only=True, forbid_unknown_fields=True):
    """Fields that /v1/chat/completions and /v1/completions have in common."""

    stream_options: StreamOptions | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_N)] | None = None
    max_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    seed: Seed | None = None
    stop: Stop | Annotated[list[Stop], msgspec.Meta(max_length=MAX_STOPS)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        Annotated[
            dict[Natural, Annotated[float, BIAS]],
            msgspec.Meta(max_length=MAX_LOGIT_BIAS),
        ]
        | None
    ) = None
    temperature_last: bool | None = None
    """Apply top_k, top_p and min_p to the distribution without temperature."""
    # The fields from here on have the names and meanings of vLLM.
    top_k: TopK | None = None
    min_p: MinP | None = None
    min_tokens: Natural | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Natural], msgspec.Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = (
        None
    )
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    repetition_penalty: Annotated[float, REPETITION_PENALTY] | None = None
    allowed_token_ids: Annotated[list[Natural], msgspec.Meta(min_length=1)] | None = None
    bad_words: (
        Annotated[
            list[Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS)]],
            msgspec.Meta(max_length=MAX_BAD_WORDS),
        ]
        | None
    ) = None
    prompt_logprobs: NumLogprobs | None = None
    """Return the logprobs of each token of the prompt; not in streams."""
    repetition_detection: RepetitionDetection | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool | None = None
    """Return the token ids of the prompt and of each choice too."""
    # Not implemented: see NOT_YET.
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_decoding_backend: Any = None
    guided_whitespace_pattern: Any = None
    truncate_prompt_tokens: Any = None


_ENGINE_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "temperature_last",
    "min_tokens",
    "seed",
    "stop",
    "ignore_eos",
    "stop_token_ids",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
)


def refuse_not_yet(request: msgspec.Struct, table: Mapping[str, tuple[Any, ...]] = NOT_YET) -> None:
    """Raise ApiError for a field that would have no effect."""
    for name in request.__struct_fields__:
        if (neutral := table.get(name)) is not None:
            refuse_unless(name, getattr(request, name), *neutral)
    options = getattr(request, "stream_options", None)
    if isinstance(options, StreamOptions):
        if not getattr(request, "stream", False):
            raise refused("stream_options", "has a meaning only with stream: true")
        if options.continuous_usage_stats and not options.include_usage:
            raise refused(
                "stream_options.continuous_usage_stats",
                "has a meaning only with include_usage: true",
            )
        refuse_unless("stream_options.include_obfuscation", options.include_obfuscation, False)


def refuse_unless(name: str, value: object, *neutral: object) -> None:
    """Raise ApiError unless the value is null or one of `neutral`; True is not 1 here."""
    if value is None or any(
        value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral
    ):
        return
    if name in _ADVICE:
        raise refused(name, _ADVICE[name], "unsupported_field")
    allowed = " or ".join(msgspec.json.encode(n).decode() for n in neutral)
    raise refused(
        name,
        "is not supported by this server; leave it out"
        + (f" or send {allowed}" if allowed else ""),
        "unsupported_field",
    )


def refusal_of(name: str) -> str:
    """Return the OpenAPI document's sentence on a field that is not implemented."""
    return f"Not implemented: {_ADVICE[name]}." if name in _ADVICE else "Not implemented."


def sampling_params(
    request: msgspec.Struct, max_tokens: int | None, defaults: Mapping[str, Any], **more: Any
) -> SamplingParams:
    """Return the request's sampling parameters for the engine.

    defaults: the model's defaults, for fields that the request leaves out
    (AsyncLLM.sampling_defaults). Raises ValidationError, and ApiError for stop strings beyond the
    bound.
    """
    given = {
        name: value
        for name in _ENGINE_FIELDS
        if (value := getattr(request, name, None)) is not None
    }
    if given.get("seed") == -1:
        del given["seed"]
    stops = given.get("stop", ())
    if sum(map(len, [stops] if isinstance(stops, str) else stops)) > MAX_STOP_CHARACTERS:
        raise refused("stop", f"has more than {MAX_STOP_CHARACTERS} characters altogether")
    if "prompt_logprobs" in given and getattr(request, "stream", False):
        raise refused("prompt_logprobs", "cannot be streamed")
    detection: RepetitionDetection | None = getattr(request, "repetition_detection", None)
    if detection is not None:
        given["repetition_detection"] = RepetitionDetectionParams(
            **msgspec.structs.asdict(detection)
        )
    if max_tokens is None and (default := defaults.get("max_tokens")) is not None:
        max_tokens = max(default, given.get("min_tokens", 0))
    return SamplingParams(**{**defaults, **given, "max_tokens": max_tokens, **more})
