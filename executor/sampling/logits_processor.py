"""The interface of code that changes logits, for all rows that ask for it at once."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from sidestep.executor.runner.transfer import to_device
from sidestep.ipc.params.logits_controls import Controls
from sidestep.ipc.transport.step import Int32


@dataclass(frozen=True, kw_only=True)
class ProcessorSetup:
    """Arguments of a logits processor."""

    device: torch.device
    vocab_size: int
    num_slots: int
    """Number of slots. A request's slot is a number below this."""

    def to_device(self, values: Sequence[int] | Sequence[float]) -> Tensor:
        """Return int64 or float32 [n] on the device, without waiting for it."""
        array = np.array(values)
        return to_device(
            array.astype(np.float32 if array.dtype.kind == "f" else np.int64), self.device
        )


@dataclass(frozen=True, kw_only=True)
class EnteringRequest:
    """A request with controls that takes a slot.

    It is a new request, or one that was preempted and comes again.
    """

    slot: int
    controls: Controls
    prompt_token_ids: Int32
    output_token_ids: Int32
    """Tokens that it had produced before it was preempted. Its state is rebuilt from these and the
    prompt alone."""


class Slots(tuple[int, ...]):
    """The slots of some rows.

    `on_device` has them as a tensor, int64 [n], for tables by slot.
    """

    on_device: Tensor

    @classmethod
    def of(cls, slots: Iterable[int], on_device: Tensor) -> Self:
        """Return the same slots in both forms."""
        made = cls(slots)
        made.on_device = on_device
        return made


class LogitsProcessor(abc.ABC):
    """Changes logits of rows whose requests ask for it.

    One instance lives in each worker that samples and sees all requests; its state is kept by slot.

    All ranks must do the same. Nothing here may wait for the device: the next step is launched
    before this step's tokens are known to the host. So state that depends on sampled tokens belongs
    in tensors, which `sampled` updates.
    """

    handles_drafts: ClassVar[bool] = False
    """Whether `apply` and `sampled` may be called several times a step, for speculation.

    Each pair of calls is then for one more token of the rows; `sampled` gets -1 for a row whose
    token does not count, because a draft before it was wrong, and must leave the state of its slot
    as it is. Requests that a class without this accepts are served without drafts.
    """

    def __init__(self, setup: ProcessorSetup) -> None:
        """Keep the setup."""
        self.setup = setup

    @abc.abstractmethod
    def enter(self, request: EnteringRequest) -> bool:
        """Take in a request, and return whether its rows shall be given to `apply`.

        There is no call when the request leaves its slot. The state of the slot is overwritten when
        the next request is accepted there, or dropped in `leave`.
        """

    def leave(self, slot: int) -> None:  # noqa: B027
        """Drop the state of a request that was accepted: another is about to take its slot."""

    @abc.abstractmethod
    def apply(self, logits: Tensor, slots: Slots) -> None:
        """Change logits, float32 [n, V], in place: one row for each of `slots`.

        All these slots were accepted. The changes come before temperature and filters.
        """

    def sampled(self, token_ids: Tensor, slots: Slots) -> None:  # noqa: B027
        """Take in the tokens that were then sampled, int64 [n] on the device.

        They may be -1 only if the class says that it handles drafts.
        """
