"""Proposers guess the next tokens of a request on the host, for the CPU and the fake device.

On a GPU drafts are looked up on the device (kernels/speculation).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from sidestep.ipc.transport.step import Int32

Oracle = Callable[[int, int], Int32]
"""Returns the next n tokens that the device will sample for a slot."""


@dataclass(frozen=True)
class ProposerSettings:
    """Settings of all proposers; each reads those that it needs."""

    vocab_size: int
    min_match: int = 2
    """Fewest last tokens that must occur before, for a look-up."""
    max_match: int = 4
    """Most last tokens that are compared, for a look-up."""
    acceptance_rate: float = 0.0
    """Share of right drafts among those behind right drafts, 0 to 1, for synthetic drafts."""
    seed: int = 0
    """Seed of synthetic drafts."""
    oracle: Oracle | None = None
    """Source of the right tokens of synthetic drafts."""


class Proposer(ABC):
    """Proposes drafts: guesses of the tokens that follow.

    The registry `PROPOSERS` (ipc/common/registry.py) names the implementations. Each is made from
    ProposerSettings alone, and raises ValueError for settings that it cannot keep.
    """

    @abstractmethod
    def __init__(self, settings: ProposerSettings) -> None: ...

    @abstractmethod
    def begin(self, slot: int, tokens: Int32) -> None:
        """Take note that a request entered a slot with these known tokens.

        All that was known of the slot's last request is forgotten.
        """

    @abstractmethod
    def propose(self, slot: int, tokens: Int32, num: int) -> Int32:
        """Return at most `num` drafts of the tokens behind a request's known tokens.

        tokens [n], n >= 1: all known tokens of the request, prompt and outputs. They may be a view
        of a table and must not be kept. The drafts follow from the settings, the slot's request and
        these arguments alone.
        """
