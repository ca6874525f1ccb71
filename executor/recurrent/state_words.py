"""The columns of StateRows among the words of a GPU's step.

They come before the step's message, at places that are the same for steps of all sizes, so that
graphs can read them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sidestep.executor.recurrent.state_columns import StateColumns
from sidestep.executor.runner.input_batch import HostBatch
from sidestep.ipc.step_limits import StepLimits
from sidestep.ipc.transport.step import Int32
from sidestep.kernels.recurrent.state_rows import FEW_TOKENS, StateRows

FEW_SAVES = 16
"""Most saves that a graph takes. The kernels of chunks are made for a number of saves, and each
save that is not there costs them a little."""
_ROWS = (16, 128)
"""Numbers of rows that the kernels of steps with prompts are made for, and at last the limit."""


class StateWords:
    """The places of the columns among the words of the largest step."""

    def __init__(self, limits: StepLimits) -> None:
        assert limits.num_drafts < FEW_TOKENS, "rows of more tokens have no drafts"
        self._width = limits.state_width
        rows = limits.max_num_seqs
        self.row_ladder = [n for n in _ROWS if n < rows] + [rows]
        """Numbers of rows that steps with prompts are padded to here."""
        # Each save has a state of its own, and there are no more states.
        self._saves = max(FEW_SAVES, limits.most_states)
        sizes = (rows + 1, rows, rows, rows, rows + 1, self._saves, self._saves)
        starts = np.cumsum([0, *(-(-size // 4) * 4 for size in sizes)]).tolist()
        self._places = [slice(at, at + n) for at, n in zip(starts, sizes, strict=False)]
        self.count: int = starts[-1]
        """Words of all columns; a multiple of 4, so that the message is aligned to 16 bytes."""

    def pack(self, words: Int32, batch: HostBatch, queries: int = 1) -> None:
        """Write the columns of a step. Rows that pad it have no tokens and no saves.

        queries: tokens of each row in a step with drafts, which the batch has without its drafts.
        """
        own = StateColumns.of(batch, self._width)
        starts = own.query_starts * queries
        columns: tuple[npt.NDArray[Any], ...] = own._replace(query_starts=starts)
        padding = (starts[-1], -1, -1, 0, len(batch.saves.targets), 0, -1)
        for place, column, rest in zip(self._places, columns, padding, strict=True):
            written = words[place]
            written[: len(column)] = column
            written[len(column) :] = rest

    def rows(
        self,
        words: Tensor,
        count: int,
        tokens: int,
        prompts: int,
        *,
        queries: int = 1,
        has_many_saves: bool = False,
    ) -> StateRows:
        """Return the rows of a step, whose columns are among the words.

        count, tokens: rows and tokens, with padding. prompts: most rows of several tokens.
        queries: see `pack`. has_many_saves: whether there may be more than FEW_SAVES saves.
        """
        num_saves = self._saves
        if prompts and not has_many_saves:
            num_saves = FEW_SAVES
            count = next(n for n in self.row_ladder if n >= count)
        elif prompts:
            count = self.row_ladder[-1]
        starts, begins, ends, settled, save_starts, offsets, targets = (
            words[at] for at in self._places
        )
        long_rows = min(prompts, tokens // (FEW_TOKENS + 1))
        return StateRows(
            query_starts=starts[: count + 1],
            state_in=begins[:count],
            state_out=ends[:count],
            settled=settled[:count],
            save_starts=save_starts[: count + 1],
            save_offsets=offsets[:num_saves],
            save_rows=targets[:num_saves],
            max_long_tokens=tokens if long_rows else 0,
            max_long_rows=long_rows,
            max_drafts=queries - 1,
        )
