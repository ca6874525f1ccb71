"""The table of masks that the workers keep.

Masks repeat: within a string most tokens may follow, whatever the string, so that requests of one
grammar share some tens of masks. A mask of a large vocabulary has tens of kilobytes. So a worker
gets each mask once, into the next free entry of its table, and from then on only its mask index.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sidestep.engine_core.requests.grammar_state import GrammarState
from sidestep.ipc.transport.step import Int32, StepMasks

_NONE = np.empty(0, np.int32)


class MaskTable:
    """The core's copy of the workers' tables, which are all alike.

    When the table is full it is begun anew: masks that are still in use are sent once more.
    """

    def __init__(self, num_masks: int) -> None:
        """Begin empty. num_masks: entries of the table, at least the rows of a step."""
        self._num_masks = num_masks
        self._masks: list[bytes] = []
        """The mask of each entry."""
        self._indices: dict[bytes, int] = {}

    def __repr__(self) -> str:
        return f"MaskTable({len(self._masks)} of {self._num_masks} masks)"

    def message(
        self,
        step_id: int,
        rows: Sequence[int],
        grammars: Sequence[GrammarState],
        masks: Sequence[Int32],
        behind: Sequence[Sequence[Int32]] = (),
        forced: Sequence[Int32] = (),
    ) -> StepMasks:
        """Return the message with a step's masks, [words] each, of the grammars in these rows.

        behind: each row's masks behind its drafts; empty if none has any. forced: each row's
        forced tokens; empty if none has any.
        """
        drafts = behind or [()] * len(grammars)
        # Nothing that this step needs may be overwritten.
        if len(self._masks) + len(grammars) + sum(map(len, drafts)) > self._num_masks:
            self.clear()
        first_new, indices = len(self._masks), list[int]()
        for grammar, mask, more in zip(grammars, masks, drafts, strict=True):
            index = self._index_of(mask.tobytes(), grammar.mask_index)
            grammar.mask_sent(index)
            indices.append(index)
            indices += [self._index_of(other.tobytes(), index) for other in more]
        return StepMasks(
            step_id,
            first_new,
            np.array(rows, np.int32),
            np.array(indices, np.int32),
            np.frombuffer(b"".join(self._masks[first_new:]), np.int32),
            np.array([1 + len(more) for more in behind], np.int32),
            np.array(list(map(len, forced)), np.int32),
            np.concatenate(forced) if forced else _NONE,
        )

    def clear(self) -> None:
        """Begin the table anew: the workers may not have taken the last masks."""
        self._masks.clear()
        self._indices.clear()

    def _index_of(self, mask: bytes, guess: int) -> int:
        """Return the index of a mask, which is added if the table lacks it.

        guess: an index that it may have; to compare is faster than to look it up.
        """
        if guess < len(self._masks) and self._masks[guess] == mask:
            return guess
        index = self._indices.get(mask)
        if index is None:
            index = self._indices[mask] = len(self._masks)
            self._masks.append(mask)
        return index
