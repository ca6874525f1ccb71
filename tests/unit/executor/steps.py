"""A scheduler for tests of the runner.

It turns whole requests into steps, and hands blocks out one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from sidestep.ipc.params.logits_controls import Controls, encode_controls
from sidestep.ipc.transport.slot_columns import empty_tables
from sidestep.ipc.transport.step import StepInput


@dataclass
class Request:
    """A request of a test, and its output."""

    prompt: Sequence[int]
    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    temperature_last: bool = False
    seed: int = 0
    min_tokens: int = 0
    stop_ids: Sequence[int] = ()
    controls: Controls = Controls()
    output: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_known_outputs: int = 0
    """Number of the prompt's last tokens that are output from before a preemption."""


def make_step(
    rows: Sequence[tuple[int, int, Sequence[int]]],
    new: dict[int, Request] | None = None,
    step_id: int = 0,
    placed: Sequence[tuple[int, int, int, int]] = (),
) -> StepInput:
    """Return a step.

    rows: (slot, tokens to compute, new block ids), rows of one token first. new: the requests
    among them that enter. placed: (slot, group, index, block) of entries in tables of groups with
    a window.
    """
    entered = [(slot, new[slot]) for slot, _, _ in rows if new and slot in new]

    def column(values: Any, dtype: Any = np.int32) -> Any:
        return np.array(list(values), dtype)

    controls = [encode_controls(r.controls) for _, r in entered]

    entering = empty_tables(len(entered))
    for record, (slot, r), asked in zip(entering, entered, controls, strict=True):
        values = {
            "slot": slot,
            "state": slot,
            "num_known": len(r.prompt),
            "num_prompt": len(r.prompt) - r.num_known_outputs,
            "num_computed": r.num_computed,
            "num_sent": len(r.prompt),
            "max_total": len(r.prompt) - r.num_known_outputs + r.max_tokens,
            "num_stop_ids": len(r.stop_ids),
            "num_control_bytes": len(asked),
        }
        for name in ("temperature", "top_p", "min_p", "temperature_last", "top_k", "seed"):
            values[name] = getattr(r, name)
        values["min_tokens"] = r.min_tokens
        for name, value in values.items():
            record[name] = value
    return StepInput(
        step_id,
        column(slot for slot, _, _ in rows),
        column(n for _, n, _ in rows),
        column(len(b) for _, _, b in rows),
        column(i for _, _, blocks in rows for i in blocks),
        entering,
        column(t for _, r in entered for t in r.prompt),
        column(t for _, r in entered for t in r.stop_ids),
        np.frombuffer(b"".join(controls), np.uint8),
        **{
            f"placed_{name}": column(one[i] for one in placed)
            for i, name in enumerate(("slots", "groups", "indices", "blocks"))
        },
    )


class Windows:
    """The blocks of requests in groups with a window.

    Blocks behind the window are another's at once, so nothing may read them any more.
    """

    def __init__(self, windows: Sequence[int], block_size: int) -> None:
        self._windows, self._size = windows, block_size
        self._held: dict[tuple[int, int], dict[int, int]] = {}
        self._free: list[int] = []

    def row(self, slot: int, first: int, count: int, new: Iterator[int]) -> Iterator[Any]:
        """Yield the entries that a row of `count` tokens adds. new: blocks that nobody has had."""
        for group, window in enumerate(self._windows, 1):
            held = self._held.setdefault((slot, group), {})
            kept = max(0, first - window + 1) // self._size
            self._free += [held.pop(index) for index in list(held) if index < kept]
            for index in range(first // self._size, (first + count - 1) // self._size + 1):
                if index not in held:
                    held[index] = self._free.pop() if self._free else next(new)
                    yield slot, group, index, held[index]


def windows_of(runner: Any) -> tuple[int, ...]:
    """Return the windows of a runner's cache groups."""
    windows: tuple[int, ...] = runner._model._args.cache_groups.windows
    return windows


def schedule(
    requests: Sequence[Request], budget: int, block_size: int, windows: Sequence[int] = ()
) -> Iterator[tuple[StepInput, list[Request]]]:
    """Yield steps until all requests are done, each with the requests that sample in it.

    windows: those of cache groups. Request i has slot i; a step has at most `budget` tokens, decode
    first. The caller appends the sampled tokens, or does so one step later: nothing here looks at
    them.
    """
    computed, new, step_id = [0] * len(requests), iter(range(1 << 30)), 0
    blocks, own = [0] * len(requests), Windows(windows, block_size)
    while True:
        wanted = [
            (i, len(r.prompt) + r.max_tokens - 1 - computed[i], max(1, len(r.prompt) - computed[i]))
            for i, r in enumerate(requests)
        ]
        order = sorted((chunk, i) for i, left, chunk in wanted if left > 0)
        if not order:
            return
        rows, entering, left = [], {}, budget
        placed: list[Any] = []
        for chunk, i in order:
            count = min(chunk, left)
            if not count:
                break
            left -= count
            needed = -(-(computed[i] + count) // block_size) - blocks[i]
            rows.append((i, count, list(islice(new, needed))))
            blocks[i] += needed
            placed += own.row(i, computed[i], count, new)
            if computed[i] == 0:
                entering[i] = requests[i]
            computed[i] += count
        rows.sort(key=lambda row: row[1] > 1)
        yield (
            make_step(rows, entering, step_id, placed),
            [requests[i] for i, _, _ in rows if computed[i] >= len(requests[i].prompt)],
        )
        step_id += 1
