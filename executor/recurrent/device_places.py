"""Where the state of each slot lies, if rows may verify drafts and a GPU computes.

executor/recurrent/state_places.py does the same where the host computes.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sidestep.ipc.step_limits import StepLimits
from sidestep.kernels.recurrent.begin_states_triton import begin_states
from sidestep.kernels.recurrent.state_rows import StateRows


class DevicePlaces:
    """Memory on the device for the rows of memory of each slot's state."""

    def __init__(self, limits: StepLimits, num_computed: Tensor) -> None:
        """Begin without requests. num_computed: int32 [slots], which each step advances.

        It is that of each stage of a pipeline, when a slot's next row runs there.
        """
        self._width = limits.state_width
        self._num_computed = num_computed
        self._settled_at, self._begins = (
            torch.zeros(count, dtype=torch.int32, device=num_computed.device)
            for count in (limits.num_slots, limits.max_num_seqs)
        )

    def place(self, rows: StateRows, header: Tensor, slots: Tensor, starts: Tensor) -> StateRows:
        """Return the rows with the states that they begin from, behind the drafts accepted.

        Launch this once a step. rows: as the host has packed them. header, slots, starts: of the
        step's message (see begin_states).
        """
        begin_states(
            self._begins,
            rows.state_in,
            header=header,
            slots=slots,
            starts=starts,
            settled=rows.settled,
            num_computed=self._num_computed,
            settled_at=self._settled_at,
            width=self._width,
        )
        return replace(rows, state_in=self._begins[: len(rows.state_in)])
