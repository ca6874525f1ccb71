"""Messages between the stages of a pipeline.

The residual stream travels from each stage to the next, and sampled ids travel from the last stage
to the first. Each rank has one partner in each stage.

Steps go through each stage in their order, and both sides of a message know its size, so no further
information is sent. The ids of a step are received right before the first step that may need them,
which follows from the steps' beats (see ipc.transport.step); until then the first stage computes
other steps. Nothing here waits for a GPU, whose own streams wait; on a CPU a rank waits for the
values that it is about to compute with.

Ids have a group of their own, and so a queue of their own. On a GPU, ids that are awaited must not
hold up what is sent after them.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from torch import Tensor

from sidestep.executor.runner.runner import WorkerArgs


class _Coming(NamedTuple):
    """Ids that have not been received yet."""

    beat: int
    slots: Tensor


class Pipeline:
    """One rank's ends of the links. With a single stage it does nothing."""

    def __init__(self, args: WorkerArgs, last_sampled: Tensor, most_in_flight: int) -> None:
        """Make the group for ids. Call this after Parallel has brought all ranks together.

        last_sampled: the table of ids by slot, int [slots], which the last stage fills and the
        first stage reads. most_in_flight: steps in flight at most.
        """
        self._stage = args.stage
        self._last_sampled = last_sampled
        size, ranks = args.parallel.tensor_parallel_size, args.parallel.num_ranks
        self._before, self._after = args.rank - size, args.rank + size
        self._first, self._last = args.rank_in_stage, ranks - size + args.rank_in_stage
        self._coming: deque[_Coming] = deque()
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._most_sent = most_in_flight
        if self._stage.count > 1:
            import torch.distributed as dist

            self._dist: Any = dist
            self._ids_group = dist.new_group(list(range(ranks)))

    def __repr__(self) -> str:
        return (
            f"Pipeline(stage {self._stage.index} of {self._stage.count}, {len(self._coming)} "
            "steps' ids coming)"
        )

    def begin_step(self, beat: int) -> None:
        """On the first stage, receive all ids that a step of this beat may need."""
        while self._coming and self._coming[0].beat <= beat - self._stage.count:
            self._receive_ids(self._coming.popleft())

    def receive_stream(self, out: Tensor) -> Tensor:
        """Receive in `out` what the stage before has computed, [T, D], and return it."""
        self._dist.recv(out, self._before)
        return out

    def send_stream(self, hidden: Tensor) -> None:
        """Send [T, D] to the stage after.

        From now on no one may write over `hidden`.
        """
        self._send(hidden, self._after, None)

    def end_step(self, beat: int, slots: Tensor) -> None:
        """Send the step's ids from the last stage, or note on the first stage that they will come.

        slots: int64 [R], the slots of the step's rows.
        """
        if self._stage.count == 1:
            return
        if self._stage.is_first:
            self._coming.append(_Coming(beat, slots))
        elif self._stage.is_last:
            self._send(self._last_sampled.index_select(0, slots), self._first, self._ids_group)

    def settle(self) -> None:
        """Receive all ids that may come.

        So no message is left under way while nothing runs.
        """
        while self._coming:
            self._receive_ids(self._coming.popleft())

    def _receive_ids(self, coming: _Coming) -> None:
        ids = self._last_sampled.new_empty((len(coming.slots), *self._last_sampled.shape[1:]))
        self._dist.recv(ids, self._last, self._ids_group)
        self._last_sampled.index_copy_(0, coming.slots, ids)

    def _send(self, tensor: Tensor, rank: int, group: Any) -> None:
        """Send a tensor, and keep it until the step has come back, when it must have arrived."""
        if len(self._sent) > self._most_sent:
            self._sent.popleft()[0].wait()
        self._sent.append((self._dist.isend(tensor, rank, group), tensor))
