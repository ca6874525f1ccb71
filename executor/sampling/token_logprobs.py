"""Log-probabilities of tokens, as the model gave them.

They are taken before penalties, masks, temperature and filters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sidestep.executor.runner.transfer import to_host
from sidestep.ipc.transport.step import Int32, Int64, LogprobColumns, UInt8

MOST_TOKENS = 64
"""Tokens whose logits are float32 at a time, which bounds the memory."""


@dataclass(frozen=True, kw_only=True)
class Logprobs:
    """Log-probabilities of n tokens, on their way to the host.

    A token's own comes first, then those of the K most probable tokens.
    """

    keys: Int64
    """[n] Key of each token's row; see LogprobColumns."""
    positions: Int64
    """[n]"""
    sizes: Int32
    """[n] How many of the K + 1 numbers are wanted for each token."""
    packed: Tensor
    """int32 [n, 1 + 2 (K + 1)] on the host when the step has ended: rank, ids, and the bits of the
    numbers."""

    def chosen(self, tokens: npt.NDArray[np.bool_]) -> Self:
        """Return those of the chosen tokens, [n], when the step has ended."""
        return type(self)(
            keys=self.keys[tokens],
            positions=self.positions[tokens],
            sizes=self.sizes[tokens],
            packed=self.packed[torch.from_numpy(tokens)],
        )


def logprobs_of(logits: Tensor, token_ids: Tensor, most: int) -> Tensor:
    """Return what `Logprobs.packed` holds, on the device, from logits [n, V] and int64 [n].

    most: number of most probable tokens for each. A token's rank is 1 if no other token is more
    probable.
    """
    values = logits.float().log_softmax(-1)
    own = values.gather(1, token_ids[:, None])
    rank = (values > own).sum(1, keepdim=True) + 1
    top = values.topk(min(most, values.shape[1]), dim=1)
    ids = torch.cat((rank, token_ids[:, None], top.indices), 1).int()
    return torch.cat((ids, torch.cat((own, top.values), 1).view(torch.int32)), 1)


def make_logprobs(packed: Tensor, keys: Int64, positions: Int64, numbers: Int32) -> Logprobs:
    """Begin the copy of `packed` to the host. numbers: most probable tokens that each asks for."""
    return Logprobs(keys=keys, positions=positions, sizes=numbers + 1, packed=to_host(packed))


def encode_logprobs(parts: Sequence[Logprobs]) -> UInt8:
    """Return the bytes for a StepOutput, once the step has ended; empty without any part."""
    if not parts:
        return np.empty(0, np.uint8)
    ranks, ids, values = [], [], []
    for part in parts:
        packed = part.packed.numpy()
        width = packed.shape[1] // 2
        wanted = np.arange(width) < part.sizes[:, None]
        ranks.append(packed[:, 0])
        ids.append(packed[:, 1 : 1 + width][wanted])
        values.append(np.ascontiguousarray(packed[:, 1 + width :]).view(np.float32)[wanted])
    return LogprobColumns(
        keys=_joined([part.keys for part in parts]),
        positions=_joined([part.positions for part in parts]),
        sizes=_joined([part.sizes for part in parts]),
        ranks=_joined(ranks),
        token_ids=_joined(ids),
        logprobs=np.concatenate(values),
    ).pack()


def _joined(columns: Sequence[Int32 | Int64]) -> Int32:
    return np.concatenate(columns).astype(np.int32)
