"""The configuration of speculation: who drafts tokens, and how many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.common.options import Options, did_you_mean, option, require
from sidestep.ipc.common.registry import PROPOSERS
from sidestep.ipc.vllm.speculation import translate_speculation

MOST_DRAFTS = 7
"""Most drafts of a row in a step: kernels take at most 8 tokens of a row that decodes."""


def tiers_of(most: int) -> tuple[int, ...]:
    """Return the numbers of drafts that steps may have: none, half of the most, and the most."""
    return tuple(sorted({0, (most + 1) // 2, most}))


@dataclass(frozen=True)
class SpeculativeConfig(Options):
    """Values of the option speculative_config, by the names that vLLM gave them."""

    method: str = option("ngram", "Who drafts tokens.", choices=tuple(PROPOSERS))
    num_speculative_tokens: int = option(4, "Most drafts of a row in a step.")
    prompt_lookup_min: int = option(1, "Look-up: fewest last tokens that must repeat.")
    prompt_lookup_max: int | None = option(
        None, "Look-up: most last tokens that are compared. Default: 5, or prompt_lookup_min."
    )
    adaptive: bool = option(
        True,
        "Verify fewer drafts, or none, where the measured times of steps say that it is faster.",
    )
    synthetic_acceptance_rate: float = option(
        0.7, "Method 'synthetic': probability that a draft is the right token."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt_lookup_max is None:
            object.__setattr__(self, "prompt_lookup_max", max(5, self.prompt_lookup_min))
        least, most = self.lookup
        for holds, problem in (
            (
                1 <= self.num_speculative_tokens <= MOST_DRAFTS,
                f"num_speculative_tokens must be from 1 to {MOST_DRAFTS}, "
                f"not {self.num_speculative_tokens}",
            ),
            (least >= 1, f"prompt_lookup_min must be at least 1, not {least}"),
            (most >= least, f"prompt_lookup_max ({most}) is less than prompt_lookup_min ({least})"),
            (most <= 16, f"prompt_lookup_max must be at most 16, not {most}"),
            (
                0 <= self.synthetic_acceptance_rate <= 1,
                "synthetic_acceptance_rate must be from 0 to 1, "
                f"not {self.synthetic_acceptance_rate}",
            ),
        ):
            require(holds, "speculative_config", problem)

    @property
    def lookup(self) -> tuple[int, int]:
        """Fewest and most tokens of a match."""
        return self.prompt_lookup_min, self.prompt_lookup_max or 0

    @classmethod
    def of(cls, values: Mapping[str, Any] | None) -> Self | None:
        """Return the configuration that a user's dict gives; None without a dict.

        Names and values may be vLLM's. Raises ValidationError for an unknown name or a wrong value;
        it names speculative_config, and after that the field.
        """
        if values is None:
            return None
        try:
            given = translate_speculation(values)
            names = [f.name for f in fields(cls)]
            for name in given:
                require(
                    name in names,
                    str(name),
                    f"is not a field; the fields are {', '.join(names)}"
                    f"{did_you_mean(str(name), names)}",
                )
            return cls(**given)
        except ValidationError as error:
            if error.field == "speculative_config":
                raise
            raise ValidationError("speculative_config", str(error)) from None
