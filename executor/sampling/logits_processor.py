"""The interface of what changes logits, for all rows that ask for it at once."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from sidestep.executor.runner.transfer import to_device
from sidestep.ipc.params.logits_controls import Controls
from sidestep.ipc.transport.step import Int32


@dataclass(frozen=True, kw_only=True)
class ProcessorSetup:
    """What a processor is made with."""

    device: torch.device
    vocab_size: int
    num_slots: int
    """Requests are known by a slot, a number below this."""

    def to_device(self, values: Sequence[int] | Sequence[float]) -> Tensor:
        """int64 or float32 [n] on the device, without waiting for it."""
        array = np.array(values)
        return to_device(
            array.astype(np.float32 if array.dtype.kind == "f" else np.int64), self.device
        )


@dataclass(frozen=True, kw_only=True)
class EnteringRequest:
    """A request with controls that takes a slot: a new one, or one that was preempted and comes
    again.
    """

    slot: int
    controls: Controls
    prompt_token_ids: Int32
    output_token_ids: Int32
    """What it had produced before it was preempted. With the prompt this is all there is to rebuild
    its state from."""


class Slots(tuple[int, ...]):
    """The slots of some rows. `on_device` has them as a tensor, int64 [n], for tables by slot."""

    on_device: Tensor

    @classmethod
    def of(cls, slots: Iterable[int], on_device: Tensor) -> Self:
        """The same slots in both forms."""
        made = cls(slots)
        made.on_device = on_device
        return made


class LogitsProcessor(abc.ABC):
    """One instance lives in each worker that samples and sees all requests; what it keeps, it keeps
    by slot.

    All ranks must do alike. Nothing here may wait for the device: the next step is launched before
    this one's tokens are known to the host. So what depends on sampled tokens belongs into tensors,
    which `sampled` brings up to date.
    """

    def __init__(self, setup: ProcessorSetup) -> None:
        self.setup = setup

    @abc.abstractmethod
    def enter(self, request: EnteringRequest) -> bool:
        """A request takes its slot. Returns whether its rows shall be given to `apply`. It leaves
        without a word: what was kept for its slot is overwritten when the next one is accepted
        there, or dropped in `leave`.
        """

    def leave(self, slot: int) -> None:  # noqa: B027
        """Another request is about to take the slot of one that was accepted."""

    @abc.abstractmethod
    def apply(self, logits: Tensor, slots: Slots) -> None:
        """Changes logits, float32 [n, V], in place: one row for each of `slots`, which were all
        accepted. They come before temperature and filters.
        """

    def sampled(self, token_ids: Tensor, slots: Slots) -> None:  # noqa: B027
        """The tokens that were then sampled, int64 [n] on the device."""
