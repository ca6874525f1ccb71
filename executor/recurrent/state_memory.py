"""Memory for the states of a rank's recurrent layers.

The core says which request owns which state (engine_core/kv_cache/state_cache.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sidestep.executor.layers.gated_delta import DeltaState, RecurrentStep, new_delta_state
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.recurrent.state_columns import StateColumns
from sidestep.executor.runner.transfer import to_device
from sidestep.ipc.model.recurrent_spec import DeltaSpec
from sidestep.ipc.transport.step import Int32
from sidestep.kernels.ops.block_copy import copy_blocks
from sidestep.kernels.recurrent.rows_in_c import RowsC
from sidestep.kernels.recurrent.state_rows import FEW_TOKENS, StateRows


class StateMemory:
    """The states of all recurrent layers of a rank."""

    def __init__(
        self,
        specs: Sequence[DeltaSpec],
        count: int,
        parallel: Parallel,
        dtype: torch.dtype,
        device: torch.device,
        width: int,
    ) -> None:
        """Allocate the memory. Layers that are alike share tensors, which few launches copy.

        count: states. width: rows of memory of each (see StateColumns).
        """
        self._width = width
        count *= width
        alike = {
            spec: [
                tensor.unflatten(0, (layers, count))
                for tensor in new_delta_state(spec, layers * count, parallel, dtype, device)
            ]
            for spec, layers in Counter(specs).items()
        }
        self._tensors = [tensor for tensors in alike.values() for tensor in tensors]
        """[layers, N, ...]"""
        each = {
            spec: map(DeltaState, *(tensor.unbind() for tensor in tensors))
            for spec, tensors in alike.items()
        }
        self._states = [next(each[spec]) for spec in specs]
        self._device = device
        self._place = RowsC()

    @property
    def nbytes(self) -> int:
        """The size of all states."""
        return sum(tensor.nbytes for tensor in self._tensors)

    def copy(self, sources: Int32, targets: Int32) -> None:
        """Copy states in all layers, behind everything that is queued already.

        The state after the last row's settled tokens is copied: sources have no drafts. No state
        is a source and a target.
        """
        # Padded to whole 16 bytes, as the kernel was compiled for; a negative source is skipped.
        columns = np.full((2, -(-len(sources) // 4) * 4), -1, np.int32)
        columns[:, : len(sources)] = sources * self._width, targets * self._width
        source, target = to_device(columns, self._device)
        for tensor in self._tensors:
            copy_blocks(tensor, source, target)

    def with_rows(self, rows: StateRows) -> RecurrentStep:
        """Return the states, and the rows of a step that use them."""
        return RecurrentStep(self._states, rows)

    def with_columns(self, columns: StateColumns) -> RecurrentStep:
        """Return the same, with the rows as the host has laid them out."""
        assert (columns.state_out >= 0).all(), "a request without a state of its own"
        counts = np.diff(columns.query_starts)
        long = counts[counts > FEW_TOKENS]
        tensors = {name: self._column(values) for name, values in columns._asdict().items()}
        place = self._place.write(**tensors) if self._device.type == "cpu" else None
        return self.with_rows(
            StateRows(
                **tensors,
                place=place,
                max_long_tokens=int(long.sum()),
                max_long_rows=len(long),
                max_drafts=int((counts - columns.settled).max(initial=0)),
            )
        )

    def _column(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.astype(np.int32)).to(self._device)
