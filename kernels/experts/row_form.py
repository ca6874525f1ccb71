"""The form of the kernel for one row of coded experts: its warps, shared memory and options.

The kernel is kernels/cuda/source/expert_row.cu; coded_row.py launches it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch

from sidestep.kernels.experts.common.cuda_options import Activation, options_of
from sidestep.kernels.launch import cdiv
from sidestep.kernels.quantized.device_matrix import STEP

_KINDS = ("fp8", "int8", "int4", "mxfp4")
_MEMORY = 226 << 10
"""Shared memory of a block."""
_MOST_ITEMS = 8
"""Items of down of a block."""
OUTPUTS = 8
"""Inner values, or results, of an item."""
_MOST_AT_ONCE = 4
"""Steps that a warp multiplies at once."""
_LEAST_RING, _MOST_STAGES = 128 << 10, 32
"""Bytes of codes on their way, so that the memory does not rest, and slots for which there are
barriers."""


class _Workers(NamedTuple):
    """The warps of a block that multiply."""

    most: int
    held: int
    """Steps that each decodes while it waits for other blocks."""


_HOLDING, _MORE = _Workers(12, 2), _Workers(16, 1)
"""Threads of more warps have too few registers to hold as much."""


@dataclass(frozen=True)
class Matrix:
    """The form of a product's coded matrices."""

    columns: int
    group: int
    """Columns that share a scale, or 0 for all."""
    height: int
    """Rows that share a scale."""
    bias: bool

    @property
    def steps(self) -> int:
        """Steps of a row."""
        return cdiv(self.columns, STEP)

    @property
    def scales(self) -> int:
        """Scales of eight rows."""
        groups = cdiv(self.columns, self.group) if self.group else 1
        return groups * (8 if self.height == 1 else 1)


@dataclass(frozen=True)
class Behind:
    """The form of the product behind the experts, which has their kind of codes."""

    rows: int
    """Results."""
    group: int
    height: int
    """As of Matrix."""
    split: int
    """Shares of the columns, each of which is added by itself."""
    late: bool
    """Whether the next kernel's programs start when the product ends."""


NOTHING_BEHIND = Behind(0, 0, 1, 1, late=False)


@dataclass(frozen=True)
class Choosing:
    """The logits that the kernel chooses a row's experts from."""

    parts: int = 0
    """Parts of the router's product; 0 if experts are given."""
    wide: int = 0
    """Numbers of a row of it."""
    experts: int = 1
    """Experts to choose among."""
    normalised: bool = False
    joined: bool = False
    """Whether a row has one more expert behind those that are chosen."""
    gated: bool = False
    """Whether the product has a gate of that one."""


@dataclass(frozen=True)
class Ending:
    """Where a row's result goes."""

    add: bool
    next: bool
    """Whether the next norm is begun."""
    wide_norm: bool
    """Whether its weight is float32."""


@dataclass(frozen=True)
class Form:
    """A form of the kernel, which is compiled for it."""

    dtype: torch.dtype
    kind: str
    zeros: bool
    chosen: int
    gate_up: Matrix
    down: Matrix
    shares: int
    """Shares of an expert's columns of down, each of which is added by itself."""
    blocks: int
    activation: Activation
    choosing: Choosing
    ending: Ending
    behind: Behind = NOTHING_BEHIND

    @property
    def _step_bytes(self) -> int:
        """Bytes of codes of a row's step."""
        return STEP if self.kind in ("fp8", "int8") else STEP // 2

    @property
    def _in_slot(self) -> int:
        """Experts of down of a slot of the ring, which has codes of 16 rows."""
        return max(self.gate_up.steps // self.down.steps, 1) * 2

    @property
    def _slot_bytes(self) -> int:
        """Bytes of a slot: codes, and behind them scales and biases."""
        codes = 16 * max(self.gate_up.steps, self.down.steps) * self._step_bytes
        gate = cdiv(8 * self.gate_up.scales, 16) * 16 + 32
        down = cdiv(4 * self.down.scales, 16) * 16 + 16
        behind = Matrix(self.gate_up.columns, self.behind.group, self.behind.height, bias=False)
        return codes + cdiv(max(gate, self._in_slot * down, 8 * behind.scales), 128) * 128

    @property
    def _inner_bytes(self) -> int:
        """Bytes of all inner values."""
        return self.chosen * self.down.steps * STEP * 2

    @property
    def _inner_memory(self) -> int:
        """Bytes of all inner values in shared memory, where rows lie 32 bytes further apart."""
        return cdiv(self._inner_bytes + 32 * self.chosen, 128) * 128

    @property
    def _row_bytes(self) -> int:
        """Bytes of a row, and of the sums of its squares if the product behind needs them."""
        squares = cdiv(self.gate_up.columns // OUTPUTS, 4) * 16
        return self.gate_up.steps * STEP * 2 + (squares if self.behind.rows else 0)

    @property
    def exchanged(self) -> int:
        """Bytes of what the blocks exchange."""
        return self._inner_bytes + (self._row_bytes if self.behind.rows else 0)

    @property
    def _most_stages(self) -> int:
        """Slots that there is room for, beside the inputs and barriers."""
        beside = self._inner_memory + self._row_bytes + 1024
        return min(_MOST_STAGES, (_MEMORY - beside) // self._slot_bytes)

    @property
    def _down_items(self) -> int:
        """Items of down of a block, at most."""
        return cdiv(self.gate_up.columns // OUTPUTS, self.blocks)

    @property
    def _down_slots(self) -> int:
        """Slots that these items need."""
        return self._down_items * cdiv(self.chosen, self._in_slot)

    @property
    def _behind_slots(self) -> int:
        """Slots that a block needs for the product behind, two items each."""
        return cdiv(cdiv(self.behind.rows // OUTPUTS, self.blocks), 2)

    @property
    def stages(self) -> int:
        """Slots of the ring: whole turns of the teams.

        If the next layer's matrices are in codes too, its programs keep them in shared memory, and
        the more of them start early, the better. So the ring is as small as it may be: all that a
        block has of down must fit. The product behind needs no other programs, and is the sooner
        done the more of it loads while down is multiplied. Models whose experts are MXFP4 have
        other matrices in 16 bits, which need no such memory.
        """
        teams = self.warps // self._gate_parts
        room = self._most_stages // teams * teams
        least = max(cdiv(_LEAST_RING, self._slot_bytes), self._down_slots)
        alone = self.kind == "mxfp4" or self.behind.rows > 0
        return room if alone else min(room, cdiv(least, teams) * teams)

    @property
    def shared(self) -> int:
        """Bytes of memory that a launch gives to a block."""
        return self._inner_memory + self.stages * self._slot_bytes

    @property
    def _workers(self) -> _Workers:
        """The warps that multiply.

        Where they have several shares of the product behind, more of them are the sooner done.
        """
        shares = self._behind_slots * self.behind.split
        return _MORE if shares > _HOLDING.most else _HOLDING

    @property
    def gate_at_once(self) -> int:
        """Steps of an item of gate and up that a warp multiplies, by the rule of down_at_once."""
        items = cdiv(self.chosen * self.down.columns // OUTPUTS, self.blocks)

        def took(at_once: int) -> float:
            teams = self._workers.most // cdiv(self.gate_up.steps, at_once)
            return cdiv(items, teams) * (at_once + 0.4) if teams else math.inf

        return min(range(1, _MOST_AT_ONCE + 1), key=took)

    @property
    def _gate_parts(self) -> int:
        """Warps of a team."""
        return cdiv(self.gate_up.steps, self.gate_at_once)

    @property
    def warps(self) -> int:
        """Warps that multiply: whole teams."""
        return self._workers.most // self._gate_parts * self._gate_parts

    @property
    def down_at_once(self) -> int:
        """Steps of a pair of experts that a warp multiplies: those with which all are soonest done.

        Each time costs as much as 0.4 steps.
        """
        pairs = self._down_items * cdiv(self.chosen, 2)

        def took(at_once: int) -> float:
            return cdiv(pairs * cdiv(self.down.steps, at_once), self.warps) * (at_once + 0.4)

        return min(range(1, _MOST_AT_ONCE + 1), key=took)

    @property
    def threads(self) -> int:
        """Threads of a block: warps that multiply, load and finish."""
        return 32 * (self.warps + 2)

    @property
    def fits(self) -> bool:
        """Return whether blocks have room for all that they have of down, and behind it."""
        most_steps = self._workers.most * _MOST_AT_ONCE
        if self.gate_up.steps > most_steps or self._down_items > _MOST_ITEMS:
            return False
        return max(self._down_slots, self._behind_slots) <= self.stages

    @property
    def options(self) -> dict[str, int | str]:
        """The options of the compiler."""
        own = {
            "KIND": _KINDS.index(self.kind),
            "ZEROS": int(self.zeros),
            "WIDTH": self.gate_up.columns,
            "INNER": self.down.columns,
            "SHARES": self.shares,
            "STAGES": self.stages,
            "WARPS": self.warps,
            "GATE_AT_ONCE": self.gate_at_once,
            "DOWN_AT_ONCE": self.down_at_once,
            "HELD": self._workers.held,
            "MOST_ITEMS": self._down_items,
        }
        for name, matrix in (("GATE", self.gate_up), ("DOWN", self.down)):
            own |= {
                f"{name}_GROUP": matrix.group,
                f"{name}_HEIGHT": matrix.height,
                f"{name}_BIAS": int(matrix.bias),
            }
        own |= {f"BEHIND_{name.upper()}": int(value) for name, value in asdict(self.behind).items()}
        rest = asdict(self.choosing) | asdict(self.ending)
        own |= {name.upper(): int(value) for name, value in rest.items()}
        return options_of(self.dtype, self.activation, self.chosen, bias=False) | own
