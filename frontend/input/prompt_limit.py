"""The most tokens that a prompt may have."""

from __future__ import annotations

from dataclasses import dataclass

from sidestep.ipc.common.errors import PromptTooLongError


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """The limit of an engine's prompts."""

    max_model_len: int
    """Longest prompt plus output, in tokens."""
    needs_output: bool = True
    """Whether a token of output must fit behind the prompt; not in an engine that pools."""

    @property
    def longest(self) -> int:
        """Most tokens of a prompt."""
        return self.max_model_len - self.needs_output

    def error(
        self, num_tokens: int, field: str = "prompt", *, at_least: bool = False
    ) -> PromptTooLongError:
        """Return the error for a prompt that is too long; see PromptTooLongError."""
        return PromptTooLongError(
            field,
            num_tokens,
            self.max_model_len,
            at_least=at_least,
            with_output=self.needs_output,
        )

    def check(self, num_tokens: int) -> None:
        """Raise PromptTooLongError for a prompt of too many tokens."""
        if num_tokens > self.longest:
            raise self.error(num_tokens)
