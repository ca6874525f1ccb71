"""The options of `sidestep eval`, declared in one module like those of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sidestep.ipc.common.options import (
    Options,
    option,
    parse_ints,
    parse_mapping,
    require,
    require_positive,
)
from sidestep.ipc.params.ranges import MAX_LOGPROBS

_SHARES = ("min_top1", "min_needle", "min_json", "min_json_free", "min_exact")
_BOUNDS = ("max_perplexity", "max_kl")


@dataclass(frozen=True)
class EvalArgs(Options):
    """Measurements of `sidestep eval`, and limits of their figures.

    Raises ValidationError, which names the option.
    """

    text: str | None = option(
        None,
        "File of text in UTF-8 for perplexity and comparison; the bundled model's card if neither "
        "this nor another measurement is asked for.",
    )
    context: int | None = option(
        None,
        "Tokens of a window of the text, special tokens included. Default: 1024, or what the "
        "models allow if it is less.",
    )
    stride: int | None = option(
        None, "Tokens that each window but the first counts. Default: half of the context."
    )
    against: str | None = option(
        None, "Folder or hub name of the reference that the model is compared with."
    )
    against_options: dict[str, Any] | None = option(
        None,
        "Engine options of the reference, as JSON, that differ from those of the model; null for "
        "the option's default.",
        parse=parse_mapping,
    )
    kl_tokens: int = option(
        MAX_LOGPROBS,
        "Most probable tokens of each model that the KL divergence compares one by one. All other "
        "tokens count as one, so the figure is a lower bound of the true divergence. At most "
        f"{MAX_LOGPROBS}.",
    )
    needle: tuple[int, ...] | None = option(
        None,
        "Lengths of prompts in tokens, such as 512,2048, in which a number must be found again.",
        parse=parse_ints,
    )
    needle_depths: tuple[int, ...] = option(
        (0, 25, 50, 75, 100),
        "Places of the number in its prompt, in percent of the length. Default: 0,25,50,75,100.",
        parse=parse_ints,
    )
    json_validity: bool = option(
        False, "Measure the share of valid JSON, with and without a response format."
    )
    json_prompts: str | None = option(
        None,
        "File of lines with prompt or messages, and schema, for the share of valid JSON, instead "
        "of the built-in prompts.",
    )
    tasks: str | None = option(
        None, "File of lines with prompt or messages, and answer, for the share of right answers."
    )
    max_tokens: int = option(
        256, "Most tokens of an answer to a chat, a task or a prompt for JSON."
    )
    prompt_form: str = option(
        "auto",
        "Form of the built-in prompts: 'chat' by the model's template, 'text' to be continued; "
        "'auto' is 'chat' if the model has a template.",
        choices=("auto", "chat", "text"),
    )
    state: str | None = option(
        None,
        "File that keeps what is measured, so that an interrupted run goes on where it ended.",
    )
    max_perplexity: float | None = option(None, "Fail above this perplexity.")
    max_perplexity_increase: float | None = option(
        None, "Fail if the perplexity is above the reference's by more than this share of it."
    )
    max_kl: float | None = option(None, "Fail above this KL divergence, in nats a token.")
    min_top1: float | None = option(
        None, "Fail if less than this share of most probable tokens is the reference's."
    )
    min_needle: float | None = option(
        None, "Fail if less than this share of numbers is found, at any of the lengths."
    )
    min_json: float | None = option(
        None, "Fail if less than this share of JSON is valid, with the response format."
    )
    min_json_free: float | None = option(
        None, "Fail if less than this share of JSON is valid, without the response format."
    )
    min_exact: float | None = option(None, "Fail if less than this share of tasks is right.")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "stride", "max_tokens")
        require(self.context is None or self.context >= 2, "context", "must be at least 2")
        require(
            1 <= self.kl_tokens <= MAX_LOGPROBS,
            "kl_tokens",
            f"must be between 1 and {MAX_LOGPROBS}, not {self.kl_tokens}",
        )
        _check_list("needle", self.needle, 1, None)
        _check_list("needle_depths", self.needle_depths, 0, 100)
        for name in _SHARES:
            value = getattr(self, name)
            require(
                value is None or 0 <= value <= 1, name, f"must be between 0 and 1, not {value!r}"
            )
        for name in _BOUNDS:
            value = getattr(self, name)
            require(value is None or value >= 0, name, f"must not be negative, not {value!r}")
        self._check_needs()

    @property
    def measures_text(self) -> bool:
        """Whether perplexity is measured: it is by default, and where a text is given."""
        return self.text is not None or not (
            self.needle or self.measures_json or self.tasks is not None
        )

    @property
    def measures_json(self) -> bool:
        """Whether the share of valid JSON is measured."""
        return self.json_validity or self.json_prompts is not None

    def _check_needs(self) -> None:
        """Raise ValidationError for an option that has no meaning without another one."""
        needs: tuple[tuple[bool, str, tuple[str, ...]], ...] = (
            (
                self.against is not None,
                "--against",
                ("against_options", "max_perplexity_increase", "max_kl", "min_top1"),
            ),
            (
                self.measures_text,
                "--text",
                (
                    *("context", "stride", "max_perplexity"),
                    *("max_perplexity_increase", "max_kl", "min_top1"),
                ),
            ),
            (self.needle is not None, "--needle", ("min_needle",)),
            (self.measures_json, "--json-validity", ("min_json", "min_json_free")),
            (self.tasks is not None, "--tasks", ("min_exact",)),
        )
        for has, flag, names in needs:
            for name in names:
                require(has or getattr(self, name) is None, name, f"has no meaning without {flag}")


def _check_list(name: str, values: tuple[int, ...] | None, least: int, most: int | None) -> None:
    if values is None:
        return
    require(bool(values) and len(set(values)) == len(values), name, "must be different numbers")
    for value in values:
        inside = value >= least and (most is None or value <= most)
        above = f"between {least} and {most}" if most is not None else f"at least {least}"
        require(inside, name, f"must be {above}, not {value}")
