"""How many tokens of prompts a step may have while other requests wait for their next token.

Decodes lose nothing beside a chunk of prompt but the time it takes (Agrawal et al. 2024, who size
chunks by a fixed count). The time of a prompt token depends on the model, the device and the load.
So it is learnt from the steps that come back, and the chunk follows from the time that a step may
last. Where more prompts wait than one step could take, steps are as full as they can be: large
steps take less time a token, and then every request waits for the queue.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)
_HALVED_S = 60.0
"""Seconds for which steps stay smaller after one that had too little memory."""
_LEAST = 256
"""Tokens that any step may take: prompts go on even where decodes alone last too long."""
_TELLING = 64
"""Tokens of prompt that a step must have, at least, for its time to say what one takes."""
_TELLING_ALL = 2048
"""Tokens of prompt at which a step has its full weight.

Small steps take longer a token than large ones, which say more.
"""
_PADDING = 128
"""Tokens. A GPU's steps are filled up to multiples of this."""


class TokenBudget:
    """The most tokens of any step, which are fewer for some time after a want of memory."""

    def __init__(self, most: int, least: int, clock: Callable[[], float]) -> None:
        """Begin with `most` tokens. least: tokens that are always left: one for each row."""
        self._most, self._least = most, min(least, most)
        self._clock = clock
        self.now = most
        """Most tokens of the next step."""
        self._until: float | None = None

    def __repr__(self) -> str:
        return f"TokenBudget({self.now} of {self._most})"

    def halve(self) -> None:
        """Halve the tokens of a step for a minute from now."""
        self.now = max(self._least, self.now // 2)
        self._until = self._clock() + _HALVED_S
        logger.warning(
            "too little memory: steps have at most %d tokens for %g s", self.now, _HALVED_S
        )

    def tokens(self) -> int:
        """Return the most tokens of the next step."""
        if self._until is not None and self._clock() >= self._until:
            self.now, self._until = self._most, None
            logger.info("steps have up to %d tokens again", self.now)
        return self.now


class PromptBudget:
    """The learnt times of one engine's steps, and the budget that follows from them."""

    def __init__(self, target_s: float, most: int) -> None:
        """Begin without any learnt time.

        target_s: seconds that a step with decodes should last at most; 0 for any. most: tokens of
        any step.
        """
        self._target = target_s
        self._most = most
        self._decode = 0.0
        """Seconds of a step without prompts."""
        self._token: float | None = None
        """Seconds that a token of prompt adds."""

    def __repr__(self) -> str:
        return f"PromptBudget({self.tokens(0, 0)} tokens in {self._target * 1e3:g} ms)"

    @property
    def decode_s(self) -> float:
        """Seconds that a step without prompts lasts, lately; 0 before the first."""
        return self._decode

    def learn(self, num_prompt_tokens: int, seconds: float) -> None:
        """Take the time in seconds of a step that is back."""
        if num_prompt_tokens == 0:
            self._decode += 0.1 * (seconds - self._decode)
        elif num_prompt_tokens >= _TELLING:
            token = max(0.0, seconds - self._decode) / num_prompt_tokens
            weight = 1.0 if self._token is None else min(0.5, num_prompt_tokens / _TELLING_ALL)
            self._token = weight * token + (1 - weight) * (self._token or 0.0)

    def tokens(self, num_decodes: int, num_waiting_tokens: int) -> int:
        """Return the tokens of prompts that the next step may have, beside `num_decodes` decodes.

        num_waiting_tokens: tokens of prompts that have not begun.
        """
        if (
            not self._target
            or not self._token
            or not num_decodes
            or num_waiting_tokens > self._most
        ):
            return self._most
        wanted = int((self._target - self._decode) / self._token)
        filled = (num_decodes + wanted) // _PADDING * _PADDING - num_decodes
        return min(self._most, max(_LEAST, filled))
