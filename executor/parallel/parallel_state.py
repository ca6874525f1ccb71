"""Ranks of a stage, and the collectives of tensor parallelism among them.

The scheme is Megatron's (Shoeybi et al. 2019).
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sidestep.executor.parallel.peer_sums import Part, PeerSums, SumBuffer, open_peer_memory
from sidestep.kernels.launch import num_processors

if TYPE_CHECKING:
    from sidestep.kernels.sums.peer_memory_triton import PeerMemory

_TIMEOUT = timedelta(minutes=5)
"""Time that a rank waits at most for the others in a collective."""
_SOME_ADDRESS = 1 << 46
"""An address as large and as aligned as a GPU's, for launches that run nothing."""


class Parallel:
    """One rank's view of the ranks that share its layers.

    With one rank all collectives are the identity.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        *,
        stage: int = 0,
        num_stages: int = 1,
        rendezvous: str | None = None,
        listener: int | None = None,
        cuda: bool = False,
    ) -> None:
        """Join the group. rank, size: within this stage of the pipeline.

        All ranks of all stages meet at `rendezvous`: a file, or tcp://address:port, where rank 0
        has the listening socket `listener`.
        """
        self.rank = rank
        self.size = size
        self._cuda = cuda
        self._dist: Any = None
        self._group: Any = None
        self._peers: PeerSums | None = None
        self._has_world = size * num_stages > 1
        if self._has_world:
            import torch.distributed as dist

            dist.init_process_group(
                "nccl" if cuda else "gloo",
                store=_store(rendezvous or "", size * num_stages, listener),
                rank=stage * size + rank,
                world_size=size * num_stages,
                timeout=_TIMEOUT,
            )
            self._dist = dist if size > 1 else None
            if size > 1 and num_stages > 1:  # all ranks take part in making each group
                groups = [
                    dist.new_group(list(range(i * size, (i + 1) * size))) for i in range(num_stages)
                ]
                self._group = groups[stage]

    def __repr__(self) -> str:
        return f"Parallel(rank {self.rank} of {self.size})"

    def part(self, buffer: SumBuffer, rows: int) -> Part | None:
        """Return where to write what this rank adds to a sum, for the other ranks to read.

        rows: rows of the stream that are summed. None where the ranks sum with all_reduce.
        """
        return None if self._peers is None else self._peers.part(buffer, rows)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Replace x by its sum over ranks, and return it."""
        if self._dist is not None:
            self._dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return [T, N] of each rank side by side: [T, size * N], on every rank.

        It is written to `out`, if that is given and there are several ranks.
        """
        if self._dist is None:
            return x
        rows, width = x.shape
        parts = x.new_empty(self.size, rows, width)
        _gather_function(self._dist)(parts.view(-1, width), x.contiguous(), group=self._group)
        side_by_side = x.new_empty(rows, self.size * width) if out is None else out
        side_by_side.view(rows, self.size, width).copy_(parts.transpose(0, 1))
        return side_by_side

    def open_peer_sums(
        self, width: int, dtype: torch.dtype, most_rows: int, device: torch.device
    ) -> None:
        """Prepare sums of up to `most_rows` rows [.., width] through the GPUs' own memory.

        All ranks call this. Afterwards either all or none of them can sum so.
        """
        if self._dist is None:
            return
        from sidestep.kernels.sums.all_reduce_triton import most_buffer_bytes

        place_bytes = most_buffer_bytes(self.size, most_rows * width * dtype.itemsize)
        memory = self.open_peer_memory(place_bytes, width, dtype, device) if place_bytes else None
        self._peers = None if memory is None else PeerSums(memory, width, dtype)

    def open_peer_memory(
        self, place_bytes: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> PeerMemory | None:
        """Return memory that the ranks share; see executor.parallel.peer_sums."""
        return open_peer_memory(
            self.rank, self.size, self._group, place_bytes, width, dtype, device, self.minimum
        )

    def minimum(self, value: int) -> int:
        """Return the smallest of all ranks' values, on every rank.

        The ranks of other stages take part too.
        """
        if not self._has_world:
            return value
        import torch.distributed as dist

        lowest = torch.tensor(value, dtype=torch.int64, device="cuda" if self._cuda else "cpu")
        dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
        return int(lowest)

    def share(self, total: int) -> range:
        """Return this rank's part of `total` things; all parts have the same size.

        `total` is a multiple of the number of ranks.
        """
        part = total // self.size
        return range(self.rank * part, (self.rank + 1) * part)

    def kv_heads(self, total: int) -> range:
        """Return this rank's KV heads.

        With more ranks than heads, several ranks hold the same head.
        """
        if total >= self.size:
            return self.share(total)
        head = self.rank * total // self.size
        return range(head, head + 1)


def _store(rendezvous: str, num_ranks: int, listener: int | None) -> Any:
    """Return the store through which ranks meet."""
    from torch import distributed

    dist: Any = distributed
    if not rendezvous.startswith("tcp://"):
        return dist.FileStore(rendezvous, num_ranks)
    address, _, port = rendezvous.removeprefix("tcp://").rpartition(":")
    return dist.TCPStore(
        address.strip("[]"),
        int(port),
        num_ranks,
        listener is not None,
        timeout=_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener,
    )


def _gather_function(dist: Any) -> Any:
    """Return torch's all_gather of one tensor, under the name that this version of torch prefers.

    The older name makes newer versions write a warning to the screen.
    """
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class LoneRank(Parallel):
    """A rank without its group. Nothing is computed with it; only its shapes are used."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size

    def open_peer_sums(
        self, width: int, dtype: torch.dtype, most_rows: int, device: torch.device
    ) -> None:
        """Prepare sums through memory that stands for that of the ranks."""
        from sidestep.kernels.sums.all_reduce_triton import most_buffer_bytes
        from sidestep.kernels.sums.peer_memory_triton import (
            MAX_PROGRAMS,
            NUM_COUNTERS,
            PeerMemory,
            space_bytes,
        )

        place_bytes = (
            most_buffer_bytes(self.size, most_rows * width * dtype.itemsize) if self.size > 1 else 0
        )
        if place_bytes:
            memory = PeerMemory(
                self.rank,
                (_SOME_ADDRESS,) * self.size,
                torch.empty(space_bytes(self.size, place_bytes), dtype=torch.uint8, device=device),
                torch.zeros(NUM_COUNTERS, dtype=torch.int64, device=device),
                place_bytes,
                min(MAX_PROGRAMS, num_processors(device)),
            )
            self._peers = PeerSums(memory, width, dtype)

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return x side by side as often as there are ranks."""
        if self.size == 1:
            return x
        return torch.cat([x] * self.size, -1) if out is None else out
