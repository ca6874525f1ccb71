"""Sums over ranks through one another's memory, and where in the model they are used.

A rank writes what it has to add straight into memory that the others can read: a *part*, in one of
three buffers. One kernel then sums the parts of all ranks, adds the residual stream and norms the
result (kernels.sums.all_reduce_triton). A sum's position in the model fixes which buffer it uses,
so that two sums in a row never use the same one: a step begins with the embedding's buffer, then
attention's and the MLP's take turns. Where a step's first sums are too large for this, it begins
with attention's; it always ends with the MLP's.
"""

from __future__ import annotations

import enum
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sidestep.ipc.common.errors import EngineStartError
from sidestep.kernels.ops.rms_norm import RmsNorm, Stream

if TYPE_CHECKING:
    from sidestep.kernels.sums.all_reduce_triton import Kind, SumConfig
    from sidestep.kernels.sums.peer_memory_triton import PeerMemory

logger = logging.getLogger(__name__)

_TRIAL_TIMEOUT_S = 60.0
"""Seconds for the first sums, once they are compiled; another rank may still be compiling."""
_EPS = 1e-6
"""Epsilon of the norm in the first sums."""


class SumBuffer(enum.IntEnum):
    """Where in the model a sum is, which says which of the three buffers it uses."""

    EMBEDDING = 0
    ATTENTION = 1
    MLP = 2


@dataclass(frozen=True)
class Part:
    """This rank's contribution to a sum.

    Its holder writes `mine`, then calls `sum` once, on all ranks.
    """

    mine: Tensor
    """[T, D]"""
    _memory: PeerMemory
    _buffer: SumBuffer
    _config: SumConfig

    def sum(self, norm: RmsNorm, residual: Tensor | None = None) -> Stream:
        """Return the sum of all ranks' parts and of the residual stream, normed by `norm`.

        residual [T, D] is written over and must be the same on all ranks. All ranks get the same
        bits.
        """
        from sidestep.kernels.sums.all_reduce_triton import sum_parts

        hidden = torch.empty_like(self.mine) if residual is None else residual
        normed = sum_parts(
            self._memory, self._buffer, hidden, norm, self._config, add=residual is not None
        )
        return Stream(hidden, norm, done=normed)


class PeerSums:
    """Sums of rows of one width and type."""

    def __init__(self, memory: PeerMemory, width: int, dtype: torch.dtype) -> None:
        self._memory = memory
        self._width = width
        self._dtype = dtype
        self._last: SumBuffer | None = None

    def __repr__(self) -> str:
        return (
            f"PeerSums({len(self._memory.addresses)} ranks, parts up to "
            f"{self._memory.buffer_bytes} bytes)"
        )

    def part(self, buffer: SumBuffer, rows: int) -> Part | None:
        """Return this rank's part of a sum; None where torch.distributed is faster."""
        from sidestep.kernels.sums.all_reduce_triton import choose

        row_bytes = self._width * self._dtype.itemsize
        config = choose(len(self._memory.addresses), rows, row_bytes)
        if rows == 0 or config is None or rows * row_bytes > self._memory.buffer_bytes:
            return None
        assert buffer != self._last, "other ranks may still be reading what was there"
        self._last = buffer
        return Part(
            self._memory.part(buffer, rows, self._width, self._dtype), self._memory, buffer, config
        )


def open_peer_memory(
    rank: int,
    size: int,
    group: Any,
    place_bytes: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    minimum: Callable[[int], int],
) -> PeerMemory | None:
    """Return memory that the GPUs of a group share, tried out with rows of this width and type.

    Returns None, with one line in the log, where such memory cannot be had. All ranks call this,
    and all get the same answer. Raises EngineStartError if the first sums do not end.

    minimum: returns the smallest of the ranks' values, when all ranks have called it. No rank goes
    on to an action that all ranks must take before it knows that all of them can.
    """
    from sidestep.kernels.launch import num_processors
    from sidestep.kernels.sums.peer_memory_triton import (
        MAX_PROGRAMS,
        NUM_COUNTERS,
        PeerMemory,
        space_bytes,
    )

    space: Tensor | None = None
    addresses: tuple[int, ...] = ()
    memory: PeerMemory | None = None

    def allocate() -> None:
        nonlocal space
        space = _allocate(space_bytes(size, place_bytes), device)

    def exchange() -> None:
        nonlocal addresses
        assert space is not None
        addresses = _exchange(space, rank, size, group)
        space.zero_()  # before any rank writes a flag
        torch.cuda.synchronize(device)

    def try_out() -> None:
        nonlocal memory
        assert space is not None
        programs = minimum(min(MAX_PROGRAMS, num_processors(device)))
        memory = PeerMemory(
            rank,
            addresses,
            space,
            torch.zeros(NUM_COUNTERS, dtype=torch.int64, device=device),
            place_bytes,
            programs,
        )
        right = try_sums(memory, width, dtype)
        _await_end()
        if not right:
            raise RuntimeError("it gives wrong sums")

    for act in (lambda: _require_access(rank, size, device), allocate, exchange, try_out):
        if not _all_can(act, rank, size, minimum):
            return None
    return memory


def _all_can(act: Callable[[], None], rank: int, size: int, minimum: Callable[[int], int]) -> bool:
    """Act, and return whether all ranks could; the first rank that could not logs its reason."""
    reason = None
    try:
        act()
    except EngineStartError:
        raise
    except Exception as error:  # the library raises its own and the driver's
        reason = (str(error).splitlines() or [type(error).__name__])[0]
    failed = minimum(size if reason is None else rank)
    if failed < size:
        if failed == rank and reason is not None:  # not the rank of this number in another stage
            logger.warning(
                "ranks sum through torch.distributed, not through one another's memory: %s", reason
            )
        return False
    return True


def _require_access(rank: int, size: int, device: torch.device) -> None:
    """Raise RuntimeError if this rank's GPU cannot read the others'."""
    first = device.index - rank
    for other in range(first, first + size):
        if other != device.index and not torch.cuda.can_device_access_peer(device, other):
            raise RuntimeError(f"GPU {device.index} has no access to GPU {other}")


def _allocate(num_bytes: int, device: torch.device) -> Tensor:
    """Allocate memory that the group's other GPUs can map."""
    # Multicast is not used, and setting it up may do harm where GPUs are shared with other
    # machines.
    os.putenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    from torch._C._distributed_c10d import _SymmetricMemory

    # An allocation of its own: `symmetric_memory.empty` takes memory from a pool, at an offset that
    # handles do not report in all versions.
    return _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)


def _exchange(space: Tensor, rank: int, size: int, group: Any) -> tuple[int, ...]:
    """Return the address of each rank's space in this process.

    The spaces stay mapped as long as `space` lives.
    """
    import torch.distributed as dist
    from torch.distributed import _symmetric_memory as symmetric_memory

    whole: Any = dist.group.WORLD
    handle = symmetric_memory.rendezvous(space, whole if group is None else group)
    addresses = tuple(
        handle.get_buffer(peer, (space.numel(),), torch.uint8).data_ptr() for peer in range(size)
    )
    if addresses[rank] != space.data_ptr() or handle.rank != rank:
        raise RuntimeError("the handle's buffers are not what was allocated")
    _handles.append(handle)
    return addresses


_handles: list[Any] = []
"""Handles of mapped memory, kept for the life of the process: kernels hold bare addresses."""


def try_sums(memory: PeerMemory, width: int, dtype: torch.dtype) -> Tensor:
    """Compile the kernels and sum known rows [.., width]; return whether all was right, bool []."""
    from sidestep.kernels.sums.all_reduce_triton import SumConfig, sum_parts
    from sidestep.kernels.sums.pushed_sum_triton import can_push

    ranks, device = len(memory.addresses), memory.own.device
    row_bytes = width * dtype.itemsize
    most = min(2 * ranks + 1, memory.buffer_bytes // row_bytes)
    most_pushed = next((rows for rows in range(most, 0, -1) if can_push(ranks, rows, row_bytes)), 0)
    norm = RmsNorm(torch.ones(width, dtype=dtype, device=device), _EPS)
    # Whole numbers, so that any order gives the same sum. Neighbours, rows and ranks have different
    # numbers.
    right = torch.ones((), dtype=torch.bool, device=device)
    trials: tuple[tuple[SumBuffer, Kind, bool, int], ...] = (
        (SumBuffer.EMBEDDING, "one_shot", False, most),
        (SumBuffer.ATTENTION, "one_shot", True, most),
        (SumBuffer.EMBEDDING, "pushed", False, most_pushed),
        (SumBuffer.ATTENTION, "pushed", True, most_pushed),
        (SumBuffer.EMBEDDING, "two_shot", False, most),
        (SumBuffer.MLP, "two_shot", True, most),
    )
    for buffer, kind, add, rows in trials:
        if rows == 0:
            continue
        base = (torch.arange(rows * width, device=device) % 61).view(rows, width)
        memory.part(buffer, rows, width, dtype).copy_(base + memory.rank)
        hidden = base.to(dtype)
        normed = sum_parts(memory, buffer, hidden, norm, SumConfig(kind, memory.programs), add=add)
        expected = ((ranks + add) * base + ranks * (ranks - 1) // 2).to(dtype)
        assert normed is not None
        wide = expected.float()
        reference = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPS)
        right &= (hidden == expected).all() & ((normed.float() - reference).abs() < 0.05).all()
    return right


def _await_end() -> None:
    """Raise EngineStartError if the launched kernels do not end."""
    done = torch.cuda.Event()
    done.record()
    until = time.monotonic() + _TRIAL_TIMEOUT_S
    while not done.query():
        if time.monotonic() > until:
            raise EngineStartError(
                "disable_custom_all_reduce: the GPUs do not see what they write to one another's "
                "memory; start with --disable-custom-all-reduce"
            )
        time.sleep(0.001)
