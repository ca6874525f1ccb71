"""The table that benchmarks/kernels/all_reduce.py makes of its measurements."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.kernels.all_reduce import (
    KINDS,
    PROGRAMS,
    Row,
    entries_of,
    print_table,
    shape,
    table_text,
)


def row(
    nccl: float, one_shot: float, two_shot: float, programs: int = 64, pushed: float | None = None
) -> Row:
    """Return a row of measurements.

    The kernels are that fast with the given numbers of programs, and slower with others. A sum that
    is not pushed has no time of a pushed one.
    """
    times = {"one_shot": one_shot, "two_shot": two_shot, "pushed": pushed}
    measured = {
        f"{kind} {n} norm": time + (n != programs)
        for kind in KINDS
        if (time := times[kind]) is not None
        for n in PROGRAMS
    }
    return {"nccl": nccl, "nccl norm": nccl + 2, **measured}


def test_the_fastest_is_chosen_up_to_where_nccl_is_faster() -> None:
    rows = {
        4096: row(10, 4, 6, 16),
        8192: row(10, 4, 6, 16),
        16384: row(10, 6, 6.5),
        32768: row(10, 9, 7),
        65536: row(10, 15, 13),
        131072: row(14, 19, 15),
        262144: row(20, 40, 30),
    }
    # Between these sizes it may lose: these times do not contain all that a kernel does beside
    # summing.
    assert entries_of(rows) == [
        (8192, "one_shot", 16),
        (16384, "one_shot", 64),
        (131072, "two_shot", 64),
    ]


def test_parts_are_pushed_where_that_was_measured_and_is_fastest() -> None:
    rows = {4096: row(10, 4, 6, pushed=2.5), 8192: row(10, 4, 6, pushed=4.5), 16384: row(10, 6, 7)}
    assert entries_of(rows) == [(4096, "pushed", 64), (16384, "one_shot", 64)]


def test_a_table_has_cells_without_a_time_where_parts_are_not_pushed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = {8192: row(10, 4, 6, pushed=2.5), 1 << 20: row(10, 6, 7)}
    print_table(
        2,
        {
            size: times | {name.removesuffix(" norm"): time for name, time in times.items()}
            for size, times in rows.items()
        },
    )
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "| 8 KB | 12.0 | 12.0 | 2.5 | 2.5 | 4.0 | 4.0 | 6.0 | 6.0 |",
        "| 1 MB | 12.0 | 12.0 |  |  | 6.0 | 6.0 | 7.0 | 7.0 |",
    ]


def test_where_nccl_is_always_faster_nothing_is_chosen() -> None:
    assert entries_of({4096: row(1, 4, 6)}) == []


def test_what_is_written_is_the_table_and_what_was_not_measured_is_kept() -> None:
    measured: Any = {
        2: [(4096, "one_shot", 64)],
        4: [(4096, "one_shot", 16), (8192, "two_shot", 128)],
        3: [],
    }
    before: Any = {4: ((1, "one_shot", 1),), 8: ((2, "two_shot", 2),)}
    scope: dict[str, Any] = {}
    text = table_text(measured, before, "GPU")
    exec(text, scope)
    assert scope["SUMS"] == {
        **before,
        **{ranks: tuple(entries) for ranks, entries in measured.items()},
    }
    assert [line for line in text.splitlines() if "not measured" in line] == [
        "    8: (  # not measured on it"
    ]


def test_shapes_hold_the_bytes() -> None:
    assert [shape(n) for n in (4096, 8192, 1 << 20)] == [(1, 2048), (1, 4096), (128, 4096)]
