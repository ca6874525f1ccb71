"""What travels between the stages of a pipeline: the residual stream from each to the next, and the
ids that were sampled from the last to the first, each rank having one partner in each stage.

Steps go through each stage in their order, and both sides of a message know its size, so nothing
else has to be said. The ids of a step are received right before the first step that may need them,
which is told by the steps' beats (see ipc.step); until then the first stage computes others.
Nothing here waits for a GPU, whose own streams wait; on a CPU a rank waits for what it is about to
compute with.

Ids have a group, and so a queue, of their own: on a GPU those that are awaited must not hold up
what is sent after them.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sidestep.executor.runner.runner import WorkerArgs


class _Coming(NamedTuple):
    """Ids that have not been received."""

    beat: int
    slots: Tensor


class Pipeline:
    """One rank's ends of the links. Of a single stage: nothing."""

    def __init__(self, args: WorkerArgs, last_sampled: Tensor, most_in_flight: int) -> None:
        """last_sampled: the table of ids by slot, int [slots], which the last stage fills and the
        first one reads. most_in_flight: steps. Comes after Parallel, which brings all ranks
        together.
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
        return f"Pipeline(stage {self._stage.index} of {self._stage.count}, {len(self._coming)} steps' ids coming)"

    def begin_step(self, beat: int) -> None:
        """On the first stage: the table has all ids that a step of this beat may need."""
        while self._coming and self._coming[0].beat <= beat - self._stage.count:
            self._receive_ids(self._coming.popleft())

    def receive_stream(self, out: Tensor) -> Tensor:
        """What the stage before has computed, [T, D], in `out`."""
        self._dist.recv(out, self._before)
        return out

    def send_stream(self, hidden: Tensor) -> None:
        """[T, D] to the stage after, which nobody may write over from now on."""
        self._send(hidden, self._after, None)

    def end_step(self, beat: int, slots: Tensor) -> None:
        """The step's ids are in the last stage's table, and will be in the first one's. slots:
        int64 [R], its rows.
        """
        if self._stage.count == 1:
            return
        if self._stage.is_first:
            self._coming.append(_Coming(beat, slots))
        elif self._stage.is_last:
            self._send(self._last_sampled.index_select(0, slots), self._first, self._ids_group)

    def settle(self) -> None:
        """Receives what may come, so that no message is left under way while nothing runs."""
        while self._coming:
            self._receive_ids(self._coming.popleft())

    def _receive_ids(self, coming: _Coming) -> None:
        ids = torch.empty(
            len(coming.slots), dtype=self._last_sampled.dtype, device=self._last_sampled.device
        )
        self._dist.recv(ids, self._last, self._ids_group)
        self._last_sampled.index_copy_(0, coming.slots, ids)

    def _send(self, tensor: Tensor, rank: int, group: Any) -> None:
        """The tensor lives until the step has come back, when it must have arrived."""
        if len(self._sent) > self._most_sent:
            self._sent.popleft()[0].wait()
        self._sent.append((self._dist.isend(tensor, rank, group), tensor))
