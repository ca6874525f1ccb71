"""The columns that a worker keeps of each slot, declared once.

A request that enters a slot brings one value of each column. From the declaration follow the record
on the wire (`ENTERING`), the worker's host tables, the words that a GPU's step packs and the
kernel's indices into the device table. A new column is one line here, and the place that uses it:
a column of a sampling parameter is filled from it, any other by the core's step plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sidestep.ipc.params.sampling_params import SamplingParams

Entering = npt.NDArray[np.void]
"""[N] Records of ENTERING, one for each request that enters."""


@dataclass(frozen=True)
class SlotColumn:
    """One value of each slot."""

    name: str
    dtype: type[np.generic]
    default: float = 0
    """Value of a slot that no request has taken yet."""
    of: Callable[[SamplingParams], float] | None = None
    """The value of a request; None if the core's step plan gives it."""
    on_device: bool = False
    """Whether kernels read it, so that a GPU keeps it too."""

    @property
    def num_words(self) -> int:
        """Words of 32 bits that the value takes on a device."""
        return np.dtype(self.dtype).itemsize // 4


SLOT_COLUMNS = (
    SlotColumn("temperature", np.float32, 0, lambda p: p.temperature, on_device=True),
    SlotColumn("top_p", np.float32, 1, lambda p: p.top_p, on_device=True),
    SlotColumn("min_p", np.float32, 0, lambda p: p.min_p, on_device=True),
    SlotColumn("top_k", np.int32, 0, lambda p: max(0, p.top_k), on_device=True),
    SlotColumn("seed", np.int64, 0, lambda p: p.seed or 0, on_device=True),
    SlotColumn("temperature_last", np.int32, 0, lambda p: p.temperature_last, on_device=True),
    # Prompt plus the most outputs: no token at or behind this position is computed.
    SlotColumn("max_total", np.int32, on_device=True),
    # Most drafts of a step; 0 for beams, whose tokens a search chooses.
    SlotColumn("max_drafts", np.int32, on_device=True),
    SlotColumn("slot", np.int32),
    # Known tokens: the prompt and, after a preemption, the output so far.
    SlotColumn("num_known", np.int32),
    # The prompt alone; `min_tokens` counts from here.
    SlotColumn("num_prompt", np.int32),
    # Tokens whose KV is already in the cache: a prefix hit, or another beam's tokens.
    SlotColumn("num_computed", np.int32),
    # How many of the last known tokens are sent: those that are not in the cache. A request that
    # has controls and is no beam sends all, since controls may look at what came before.
    SlotColumn("num_sent", np.int32),
    SlotColumn("min_tokens", np.int32, 0, lambda p: p.min_tokens),
    # Tokens that must not be sampled before `min_tokens` outputs; 0 where `min_tokens` is 0.
    SlotColumn("num_stop_ids", np.int32),
    # State of recurrent layers that the request owns; -1 in a model without such layers.
    SlotColumn("state", np.int32, -1),
    # Bytes of encoded controls; 0 for a plain request.
    SlotColumn("num_control_bytes", np.int32),
)
"""All columns, those of the device first: their words follow one another in a record."""

ENTERING = np.dtype([(column.name, column.dtype) for column in SLOT_COLUMNS])
"""Type of the record that a request brings when it enters."""
_GIVEN = [column.of for column in SLOT_COLUMNS]
_NAMES = [column.name for column in SLOT_COLUMNS]

DEVICE_WORDS = sum(column.num_words for column in SLOT_COLUMNS if column.on_device)
"""Words of a record, at its beginning, that a device keeps of each slot."""


def device_word(name: str) -> int:
    """Return the index of the first word of a column in a slot's row of the device table."""
    return int(ENTERING.fields[name][1]) // 4 if ENTERING.fields is not None else 0


def record_of(sampling: SamplingParams, **values: int) -> tuple[float, ...]:
    """Return the record of a request as a tuple, for an array of ENTERING.

    values: one for each column that does not follow from the sampling parameters.
    """
    return tuple(
        values[name] if of is None else of(sampling)
        for name, of in zip(_NAMES, _GIVEN, strict=True)
    )


def empty_tables(num_slots: int) -> Entering:
    """Return a record for each slot, with the defaults."""
    tables = np.zeros(num_slots, ENTERING)
    for column in SLOT_COLUMNS:
        tables[column.name] = column.default
    return tables


def device_words(records: Entering) -> npt.NDArray[np.int32]:
    """Return the words of the records that a device keeps, int32 [N, DEVICE_WORDS]."""
    words: npt.NDArray[Any] = np.ascontiguousarray(records).view(np.int32)
    return words.reshape(len(records), -1)[:, :DEVICE_WORDS]
