"""Parameters of sampling and of stopping, checked where they are made.

A wrong value fails at the call.
"""

from __future__ import annotations

import copy
import enum
from typing import Any, Self

import msgspec

from sidestep.ipc.params.ranges import (
    BIAS,
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
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
    check,
    is_in,
    is_int,
    is_number,
)
from sidestep.ipc.params.structured_outputs_params import StructuredOutputsParams
from sidestep.ipc.vllm.params import ParamsMeta, plain

_DERIVE = 0x9E3779B97F4A7C15
"""Factor that derives the seeds of further completions."""


class RequestOutputKind(enum.IntEnum):
    """Content of each output of a stream."""

    CUMULATIVE = 0
    """All text and tokens so far."""
    DELTA = 1
    """The text and tokens that are new since the last output."""
    FINAL_ONLY = 2
    """All text and tokens, in one output at the end."""


class RepetitionDetectionParams(
    msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, metaclass=ParamsMeta
):
    """End of an output whose last tokens are one pattern of tokens, repeated `min_count` times.

    Raises ValidationError, which names the field.
    """

    max_pattern_size: int
    """Tokens of the longest pattern that is looked for; at most MAX_PATTERN."""
    min_pattern_size: int = 1
    """Tokens of the shortest pattern that is looked for."""
    min_count: int = 3
    """Times that the pattern must be there in a row; at least 2."""

    def __post_init__(self) -> None:
        name = "repetition_detection"
        check(
            is_int(self.min_pattern_size) and is_in(self.min_pattern_size, PATTERN_SIZE),
            f"{name}.min_pattern_size",
            f"must be at least {PATTERN_SIZE.ge}, not {self.min_pattern_size!r}",
        )
        check(
            is_int(self.max_pattern_size)
            and self.min_pattern_size <= self.max_pattern_size <= MAX_PATTERN,
            f"{name}.max_pattern_size",
            f"must be between min_pattern_size and {MAX_PATTERN}, not {self.max_pattern_size!r}",
        )
        check(
            is_int(self.min_count) and is_in(self.min_count, PATTERN_COUNT),
            f"{name}.min_count",
            f"must be at least {PATTERN_COUNT.ge}, not {self.min_count!r}",
        )

    def found_in(self, tokens: list[int], first: int) -> bool:
        """Return whether the tokens from number `first` on end in a repeated pattern.

        It costs a comparison for each size that does not repeat.
        """
        num_tokens, count = len(tokens) - first, self.min_count
        for size in range(
            self.min_pattern_size, min(self.max_pattern_size, num_tokens // count) + 1
        ):
            # Shifted by one pattern, the tokens are the same.
            if (
                tokens[-1] == tokens[-1 - size]
                and tokens[-size * (count - 1) :] == tokens[-size * count : -size]
            ):
                return True
        return False


class SamplingParams(
    msgspec.Struct,
    kw_only=True,
    frozen=True,
    array_like=True,
    forbid_unknown_fields=True,
    metaclass=ParamsMeta,
):
    """Sampling parameters of one request, with vLLM's names and defaults.

    They are frozen: `clone` makes a copy with other values. Numbers and arrays of numpy are
    converted to Python's own. Raises ValidationError, which names the field, when a value is out of
    range or the name of a field is unknown.
    """

    n: int = 1
    """Completions of the prompt, each with a seed of its own that is derived from `seed`.

    The first is that of n=1.
    """
    best_of: int | None = None
    """Number of completions to make, of which the `n` with the highest cumulative logprob return.

    They come in one output at the end, the best first.
    """
    temperature: float = 1.0
    """0 is greedy; otherwise logits are divided by it (by 0.01 if it is less). At most 2."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probability reaches this; in (0, 1]."""
    top_k: int = 0
    """Sample from this many most probable tokens; 0 or -1 for all."""
    min_p: float = 0.0
    """Drop tokens less probable than this share of the most probable one; in [0, 1]."""
    temperature_last: bool = False
    """Filter by the probabilities without temperature; draw with it from the tokens that stay."""
    seed: int | None = None
    """Seed of the sampling: it gives the same tokens, whatever else is in the batch.

    None or -1 draws a new seed for each request, derived from the engine's option `seed` if it is
    set.
    """
    stop: str | list[str] | None = None
    """Texts that end the output; left out of it unless `include_stop_str_in_output`."""
    stop_token_ids: list[int] | None = None
    """Token ids that end the output; at most MAX_STOP_TOKEN_IDS."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token."""
    max_tokens: int | None = 16
    """Most output tokens; None for as many as fit in the model."""
    min_tokens: int = 0
    """Output tokens before which end-of-sequence and stop tokens cannot be sampled.

    Stop texts do not count before them either.
    """
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the output has; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time that the output has the token; in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divisor of positive logits, and factor of negative ones, of tokens in prompt or output.

    It is in [0.01, 100].
    """
    logprobs: int | None = None
    """Number of most probable tokens to report with the log-probability of each sampled one.

    At most MAX_LOGPROBS.
    """
    prompt_logprobs: int | None = None
    """The same number for each token of the prompt.

    The prompt is then computed whole, without cached prefixes.
    """
    logit_bias: dict[int, float] | None = None
    """Numbers from -100 to 100 to add to the logits of these token ids; at most MAX_LOGIT_BIAS."""
    allowed_token_ids: list[int] | None = None
    """The only tokens that are sampled."""
    bad_words: list[str] | None = None
    """Texts whose tokens are not sampled in a row, with or without a space before them.

    At most MAX_BAD_WORDS.
    """
    repetition_detection: RepetitionDetectionParams | None = None
    """When to end, with finish_reason 'repetition', an output that repeats a pattern of tokens."""
    extra_args: dict[str, Any] | None = None
    """Arguments of logits processors, by the names of their classes."""
    detokenize: bool = True
    """False leaves `text` empty (and cannot go with `stop`)."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    include_stop_str_in_output: bool = False
    """Keep the stop text at the end of the output."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """Content of each output of the stream."""
    structured_outputs: StructuredOutputsParams | None = None
    """Form that the output must have. The request ends with 'stop' when nothing more can follow.

    It goes neither with `ignore_eos` nor with `min_tokens`, which could forbid all that the form
    allows.
    """

    def __post_init__(self) -> None:
        self._make_plain()
        self._check_choices()
        self._check_distribution()
        self._check_lengths()
        self._check_stops()
        self._check_penalties()
        self._check_logprobs()
        self._check_logit_bias()
        self._check_tokens_and_words()
        self._check_output()
        self._check_structure()

    def _check_choices(self) -> None:
        check(
            is_int(self.n) and 1 <= self.n <= MAX_CHOICES,
            "n",
            f"must be a whole number between 1 and {MAX_CHOICES}, not {self.n!r}",
        )
        check(
            self.best_of is None
            or (is_int(self.best_of) and self.n <= self.best_of <= MAX_CHOICES),
            "best_of",
            f"must be a whole number between n ({self.n}) and {MAX_CHOICES}, not {self.best_of!r}",
        )
        check(
            not self.ranks_choices or self.output_kind is not RequestOutputKind.DELTA,
            "best_of",
            "is known only at the end, so it cannot go with output_kind DELTA",
        )

    def _check_distribution(self) -> None:
        check(
            is_number(self.temperature) and is_in(self.temperature, TEMPERATURE),
            "temperature",
            f"must be between {TEMPERATURE.ge} and {TEMPERATURE.le}, not {self.temperature!r}",
        )
        check(
            is_number(self.top_p) and is_in(self.top_p, TOP_P),
            "top_p",
            f"must be in ({TOP_P.gt}, {TOP_P.le}], not {self.top_p!r}",
        )
        check(
            is_int(self.top_k) and is_in(self.top_k, TOP_K),
            "top_k",
            f"must be {TOP_K.ge} or 0 (all) or at least 1, not {self.top_k!r}",
        )
        check(
            is_number(self.min_p) and is_in(self.min_p, MIN_P),
            "min_p",
            f"must be in [{MIN_P.ge}, {MIN_P.le}], not {self.min_p!r}",
        )
        check(
            self.seed is None or (is_int(self.seed) and 0 <= self.seed <= MAX_SEED),
            "seed",
            f"must be a whole number between 0 and 2**63-1, not {self.seed!r}",
        )

    def _check_lengths(self) -> None:
        check(
            self.max_tokens is None or (is_int(self.max_tokens) and self.max_tokens >= 1),
            "max_tokens",
            f"must be at least 1, not {self.max_tokens!r}",
        )
        check(
            is_int(self.min_tokens) and self.min_tokens >= 0,
            "min_tokens",
            f"must be at least 0, not {self.min_tokens!r}",
        )
        check(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"{self.min_tokens} is more than max_tokens ({self.max_tokens})",
        )

    def _check_logprobs(self) -> None:
        for field in ("logprobs", "prompt_logprobs"):
            value = getattr(self, field)
            check(
                value != -1,
                field,
                f"-1 asks for all tokens of the vocabulary; at most {MAX_LOGPROBS} of the most "
                "probable ones can be told",
            )
            check(
                value is None or (is_int(value) and is_in(value, NUM_LOGPROBS)),
                field,
                f"must be between {NUM_LOGPROBS.ge} and {NUM_LOGPROBS.le}, not {value!r}: more of "
                "each token would cost more than sampling it",
            )

    def _check_output(self) -> None:
        # The core could not read a message with these of another type, and the request would wait
        # without end.
        for field in _SWITCHES:
            value = getattr(self, field)
            check(isinstance(value, bool), field, f"must be True or False, not {value!r}")
        check(
            isinstance(self.output_kind, RequestOutputKind),
            "output_kind",
            f"must be a RequestOutputKind, not {self.output_kind!r}",
        )

    def _make_plain(self) -> None:
        """Convert values in other forms: numbers of numpy, dicts of parameters, a seed of -1."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if type(value) in _PLAIN or name == "extra_args":
                continue
            if isinstance(value, dict) and name in _NESTED:
                value = _NESTED[name](**value)
            msgspec.structs.force_setattr(self, name, plain(value))
        if self.seed == -1 and is_int(self.seed):
            msgspec.structs.force_setattr(self, "seed", None)

    @classmethod
    def from_optional(cls, **fields: Any) -> Self:
        """Return parameters from these fields. A field that is None gets its default."""
        return cls(**{name: value for name, value in fields.items() if value is not None})

    def clone(self, **changes: Any) -> Self:
        """Return a copy, with some fields changed. Raises ValidationError."""
        return type(self)(**(copy.deepcopy(msgspec.structs.asdict(self)) | changes))

    def _check_structure(self) -> None:
        if (structure := self.structured_outputs) is None:
            return
        check(
            isinstance(structure, StructuredOutputsParams),
            "structured_outputs",
            f"must be StructuredOutputsParams, not {type(structure).__name__}",
        )
        check(
            not self.ignore_eos,
            "ignore_eos",
            "cannot go with structured_outputs, which say where the output ends",
        )
        check(
            self.min_tokens == 0,
            "min_tokens",
            "cannot go with structured_outputs, which say where the output ends",
        )

    def _check_stops(self) -> None:
        check(
            self.stop is None or isinstance(self.stop, str | list | tuple),
            "stop",
            f"must be a string or a list of strings, not {self.stop!r}",
        )
        for text in self.stop_strings:
            check(
                isinstance(text, str) and text != "",
                "stop",
                f"holds {text!r}, which is not a non-empty string",
            )
        check(self.detokenize or not self.stop_strings, "stop", "needs detokenize=True")
        check(
            self.stop_token_ids is None or isinstance(self.stop_token_ids, list | tuple),
            "stop_token_ids",
            f"must be a list of token ids, not {self.stop_token_ids!r}",
        )
        check(
            len(self.stop_token_ids or ()) <= MAX_STOP_TOKEN_IDS,
            "stop_token_ids",
            f"holds {len(self.stop_token_ids or ())} ids; {MAX_STOP_TOKEN_IDS} are the most",
        )
        for token in self.stop_token_ids or ():
            check(
                is_int(token) and token >= 0,
                "stop_token_ids",
                f"holds {token!r}, which is not a token id",
            )

    @property
    def ranks_choices(self) -> bool:
        """Whether more completions are made than returned."""
        return self.best_of is not None and self.best_of > self.n

    def for_choice(self, index: int) -> SamplingParams:
        """Return the parameters of one of the `n` completions alone; `seed` must be filled in."""
        seed = self.seed if index == 0 else ((self.seed or 0) ^ (index * _DERIVE)) & MAX_SEED
        return msgspec.structs.replace(self, n=1, seed=seed)

    def _check_penalties(self) -> None:
        for field in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, field)
            check(
                is_number(value) and is_in(value, PENALTY),
                field,
                f"must be between {PENALTY.ge} and {PENALTY.le}, not {value!r}",
            )
        check(
            is_number(self.repetition_penalty)
            and is_in(self.repetition_penalty, REPETITION_PENALTY),
            "repetition_penalty",
            f"must be between {REPETITION_PENALTY.ge} and {REPETITION_PENALTY.le}, "
            f"not {self.repetition_penalty!r}",
        )
        detection = self.repetition_detection
        check(
            detection is None or isinstance(detection, RepetitionDetectionParams),
            "repetition_detection",
            f"must be RepetitionDetectionParams, not {detection!r}",
        )

    def _check_tokens_and_words(self) -> None:
        allowed, words, extra = self.allowed_token_ids, self.bad_words, self.extra_args
        check(
            allowed is None or (isinstance(allowed, list | tuple) and len(allowed) > 0),
            "allowed_token_ids",
            f"must be a list of at least one token id, not {allowed!r}",
        )
        for token in allowed or ():
            check(
                is_int(token) and token >= 0,
                "allowed_token_ids",
                f"holds {token!r}, which is not a token id",
            )
        check(
            words is None or isinstance(words, list | tuple),
            "bad_words",
            f"must be a list of strings, not {words!r}",
        )
        check(
            len(words or ()) <= MAX_BAD_WORDS,
            "bad_words",
            f"holds {len(words or ())} texts; {MAX_BAD_WORDS} are the most",
        )
        for word in words or ():
            check(
                isinstance(word, str) and word.strip() != "",
                "bad_words",
                f"holds {word!r}, which is not a text with anything but white space",
            )
            check(
                len(word) <= MAX_BAD_WORD_CHARACTERS,
                "bad_words",
                f"holds a text of {len(word)} characters; {MAX_BAD_WORD_CHARACTERS} are the most",
            )
        check(
            extra is None
            or (isinstance(extra, dict) and all(isinstance(name, str) for name in extra)),
            "extra_args",
            f"must be a dict by names of logits processors, not {extra!r}",
        )

    def _check_logit_bias(self) -> None:
        bias = self.logit_bias
        if bias is None:
            return
        check(
            isinstance(bias, dict),
            "logit_bias",
            f"must be a dict from token ids to numbers, not {bias!r}",
        )
        check(
            len(bias) <= MAX_LOGIT_BIAS,
            "logit_bias",
            f"holds {len(bias)} tokens; {MAX_LOGIT_BIAS} are the most",
        )
        for token, value in bias.items():
            check(
                is_int(token) and token >= 0,
                "logit_bias",
                f"holds {token!r}, which is not a token id",
            )
            check(
                is_number(value) and is_in(value, BIAS),
                "logit_bias",
                f"of token {token} must be between {BIAS.ge} and {BIAS.le}, not {value!r}",
            )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


_SWITCHES = [f.name for f in msgspec.structs.fields(SamplingParams) if f.type is bool]
_PLAIN = (int, float, bool, str, type(None), RequestOutputKind)
_NESTED: dict[str, Any] = {
    "structured_outputs": StructuredOutputsParams,
    "repetition_detection": RepetitionDetectionParams,
}
"""Fields that are structs of parameters. A dict may be given for each."""
