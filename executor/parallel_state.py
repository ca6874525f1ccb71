"""Tensor parallelism: which rank this is, and the collectives among ranks (Megatron; Shoeybi et al. 2019)."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

_TIMEOUT = timedelta(minutes=5)


class Parallel:
    """One rank's view of its group. With one rank all collectives are the identity."""

    def __init__(self, rank: int = 0, size: int = 1, *, rendezvous: str | None = None, cuda: bool = False) -> None:
        self.rank = rank
        self.size = size
        self._cuda = cuda
        self._dist: Any = None
        if size > 1:
            import torch.distributed as dist

            dist.init_process_group("nccl" if cuda else "gloo", init_method=f"file://{rendezvous}", rank=rank,
                                    world_size=size, timeout=_TIMEOUT)
            self._dist = dist

    def __repr__(self) -> str:
        return f"Parallel(rank {self.rank} of {self.size})"

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self._dist is not None:
            self._dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[..., N] of each rank side by side: [..., size * N], on every rank; in `out`, if that is given and there are
        several ranks."""
        if self._dist is None:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, -1, out=out)

    def minimum(self, value: int) -> int:
        """The smallest of the ranks' values, on every rank."""
        if self._dist is None:
            return value
        lowest = torch.tensor(value, dtype=torch.int64, device="cuda" if self._cuda else "cpu")
        self._dist.all_reduce(lowest, op=self._dist.ReduceOp.MIN)
        return int(lowest)

    def share(self, total: int) -> range:
        """This rank's part of `total` things, all parts alike. `total` is a multiple of the size."""
        part = total // self.size
        return range(self.rank * part, (self.rank + 1) * part)

    def kv_heads(self, total: int) -> range:
        """This rank's KV heads. With more ranks than heads, several ranks hold the same one."""
        if total >= self.size:
            return self.share(total)
        head = self.rank * total // self.size
        return range(head, head + 1)


class Apart(Parallel):
    """A rank without its group, which nothing is computed in: for shapes alone."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if self.size == 1:
            return x
        return torch.cat([x] * self.size, -1) if out is None else out
