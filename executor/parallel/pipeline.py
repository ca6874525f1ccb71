"""Messages between the stages of a pipeline.

The residual stream travels from each stage to the next. The progress of slots travels from the last
stage, which samples, to each stage before: the tokens that later steps begin with, and where in
their requests these tokens lie. Each rank has one partner in each stage.

Steps go through each stage in their order, and both sides of a message know its size, so no further
information is sent. The progress that a step has made is received right before the first step that
may need it, which follows from the steps' beats (see ipc.transport.step); until then a stage
computes other steps. Nothing here waits for a GPU, whose own streams wait; on a CPU a rank waits
for the values that it is about to compute with.

Progress has a group of its own, and so a queue of its own. On a GPU, a message that is awaited must
not hold up what is sent after it.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from torch import Tensor

from sidestep.executor.runner.runner import WorkerArgs


class _Coming(NamedTuple):
    """Progress that has not been received yet."""

    beat: int
    slots: Tensor


class Pipeline:
    """One rank's ends of the links. With a single stage it does nothing."""

    def __init__(self, args: WorkerArgs, progress: Tensor, most_in_flight: int) -> None:
        """Make the group for progress. Call this after Parallel has brought all ranks together.

        progress: a table by slot, [slots, ...] of any type and the same in all stages. The last
        stage writes it, and the others read it. most_in_flight: steps in flight at most.
        """
        self._stage = args.stage
        self._progress = progress
        size, ranks = args.parallel.tensor_parallel_size, args.parallel.num_ranks
        self._before, self._after = args.rank - size, args.rank + size
        self._earlier = range(args.rank_in_stage, ranks - size, size)
        self._last = ranks - size + args.rank_in_stage
        self._coming: deque[_Coming] = deque()
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._most_sent = most_in_flight * (len(self._earlier) if self._stage.is_last else 1)
        if self._stage.count > 1:
            import torch.distributed as dist

            self._dist: Any = dist
            self._progress_group = dist.new_group(list(range(ranks)))

    def __repr__(self) -> str:
        return (
            f"Pipeline(stage {self._stage.index} of {self._stage.count}, progress of "
            f"{len(self._coming)} steps coming)"
        )

    def begin_step(self, beat: int) -> None:
        """Receive all progress that a step of this beat may need; on the last stage do nothing."""
        while self._coming and self._coming[0].beat <= beat - self._stage.count:
            self._receive_progress(self._coming.popleft())

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
        """Send the progress of some slots from the last stage; elsewhere note that it will come.

        slots: int64 [n], the same in all stages: at least those of the rows that have sampled. Rows
        of other slots are received too, but no step reads them before their slots have sampled.
        """
        if self._stage.count == 1:
            return
        if not self._stage.is_last:
            self._coming.append(_Coming(beat, slots))
            return
        made = self._progress.index_select(0, slots)
        for rank in self._earlier:
            self._send(made, rank, self._progress_group)

    def settle(self) -> None:
        """Receive all progress that may come.

        So no message is left under way while nothing runs.
        """
        while self._coming:
            self._receive_progress(self._coming.popleft())

    def _receive_progress(self, coming: _Coming) -> None:
        made = self._progress.new_empty(len(coming.slots), *self._progress.shape[1:])
        self._dist.recv(made, self._last, self._progress_group)
        self._progress.index_copy_(0, coming.slots, made)

    def _send(self, tensor: Tensor, rank: int, group: Any) -> None:
        """Send a tensor, and keep it until the step has come back, when it must have arrived."""
        if len(self._sent) > self._most_sent:
            self._sent.popleft()[0].wait()
        self._sent.append((self._dist.isend(tensor, rank, group), tensor))
