"""Proposers guess the next tokens of a request on the host, for the CPU and the fake device.

On a GPU drafts are looked up on the device (kernels/speculation).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sidestep.ipc.common import registry
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.model.speculative_config import SpeculativeConfig
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


def make_proposer(
    config: SpeculativeConfig | None, vocab_size: int, oracle: Oracle | None = None
) -> Proposer | None:
    """Return the proposer that a configuration names; None without speculation.

    oracle: None on a device that cannot foretell its tokens. Raises EngineStartError where the
    proposer cannot keep the configuration.
    """
    if config is None:
        return None
    least, most = config.lookup
    settings = ProposerSettings(
        vocab_size=vocab_size,
        min_match=least,
        max_match=most,
        acceptance_rate=config.synthetic_acceptance_rate,
        oracle=oracle,
    )
    try:
        proposer: Proposer = registry.load(registry.PROPOSERS[config.method])(settings)
    except ValueError as error:
        raise EngineStartError(f"speculative_config: {error}") from None
    return proposer


def drafts_of_forced(forced: Int32, told: Int32) -> Int32:
    """Return the forced tokens behind those that a row has given; none if it gave others.

    forced: the tokens that a grammar alone decides, from the row's first one on.
    """
    if np.array_equal(forced[: len(told)], told):
        return forced[len(told) :]
    return forced[:0]


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
