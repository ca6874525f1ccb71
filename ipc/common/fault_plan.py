"""Faults that the fake device makes on purpose, so that tests see what the engine does about them.

A plan is data, and the same plan makes the same faults: each one has a moment, counted in messages
or named by a token, and no clock and no chance decides anything. Only device 'fake' takes a plan
(`fake_faults`), so no user of a model can meet one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.common.options import require

FaultKind = Literal["die", "hang", "raise", "oom", "slow", "drop", "corrupt"]
FaultyMessage = Literal["step", "masks", "output"]


class Fault(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One fault of one rank."""

    kind: FaultKind
    """The fault itself.

    'die' kills a process and 'hang' stops it for ever. 'raise' is an exception in a step, 'oom' one
    for want of memory, and 'slow' makes steps take longer. 'drop' and 'corrupt' lose or change a
    message.
    """
    at: int | None = None
    """The number of the step, from 0 on, at which it happens; for 'slow' the first such step. For
    'drop' and 'corrupt' it counts the messages of its sort that the rank gets or sends."""
    for_token: int | None = None
    """In place of `at`: it happens whenever the rank runs a row of a request that has this token
    among those of its prompt that were sent. Such a request is poison to every worker that runs
    it."""
    named: bool = False
    """Whether the exception of 'raise' names the row of the request with `for_token`."""
    rank: int = 0
    replica: int | None = None
    """None for every replica."""
    start: int | None = None
    """Number of the replica's start, from 0 on, in which it happens; None for every start."""
    process: Literal["worker", "core"] = "worker"
    """The process that dies or hangs: the rank's, or that of its engine core."""
    message: FaultyMessage | None = None
    """The sort of message, for 'drop' and 'corrupt': a step or its masks on their way to the rank,
    or an output on its way to the core."""
    seconds: float = 0.0
    """Seconds by which 'slow' makes each step longer."""

    def __post_init__(self) -> None:
        is_message = self.kind in ("drop", "corrupt")
        for holds, problem in (
            ((self.at is None) != (self.for_token is None), "needs one of 'at' and 'for_token'"),
            (is_message == (self.message is not None), "'message' is for 'drop' and 'corrupt'"),
            (not is_message or self.at is not None, "'drop' and 'corrupt' need 'at'"),
            (self.kind in ("die", "hang") or self.process == "worker", "cannot hit the core"),
            ((self.kind == "slow") == (self.seconds > 0), "'seconds' is for 'slow'"),
            (
                not self.named or (self.kind == "raise" and self.for_token is not None),
                "'named' is for 'raise' with 'for_token'",
            ),
        ):
            if not holds:
                raise ValueError(f"{self.kind}: {problem}")


class FaultPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The faults of an engine."""

    faults: tuple[Fault, ...]

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> FaultPlan:
        """Return the plan that is written as a mapping. Raises ValueError."""
        return msgspec.convert(dict(value), cls)

    def of_rank(self, replica: int, rank: int, start: int = 0) -> tuple[Fault, ...]:
        """Return the faults of one rank in one start of a replica."""
        return tuple(
            fault
            for fault in self.faults
            if fault.rank == rank
            and fault.replica in (None, replica)
            and fault.start in (None, start)
        )


def check_faults(value: Mapping[str, Any] | None, device: str) -> None:
    """Raise ValidationError unless the option `fake_faults` holds nothing, or a plan that works."""
    if value is None:
        return
    require(
        device == "fake", "fake_faults", f"has a meaning only with device 'fake', not {device!r}"
    )
    try:
        FaultPlan.of(value)
    except ValueError as error:
        raise ValidationError("fake_faults", str(error)) from None
