"""The columnar wire: values come out as they went in, for any sizes."""

from dataclasses import fields
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sidestep.ipc.transport.slot_columns import ENTERING, empty_tables
from sidestep.ipc.transport.step import StepInput, StepOutput

DTYPES: dict[str, Any] = {"Int32": np.int32, "Entering": ENTERING, "UInt8": np.uint8}


def column(kind: str, rng: np.random.Generator, length: int) -> Any:
    """Return a column of random values."""
    if kind != "Entering":
        return rng.integers(-99, 99, length).astype(DTYPES[kind])
    records = np.zeros(length, ENTERING)
    for name in ENTERING.names or ():
        records[name] = rng.integers(-99, 99, length)
    return records


@given(st.lists(st.integers(0, 9), min_size=40, max_size=40), st.integers(0, 2**40))
def test_round_trip(lengths: list[int], step_id: int) -> None:
    rng = np.random.default_rng(step_id)
    values: list[Any] = [
        step_id if f.type == "int" else column(str(f.type), rng, n)
        for f, n in zip(fields(StepInput), lengths, strict=False)
    ]
    data = b"".join(bytes(part) for part in StepInput(*values).encode())
    back = StepInput.decode(memoryview(data))
    for f, value in zip(fields(StepInput), values, strict=True):
        got = getattr(back, f.name)
        assert np.array_equal(got, value), f.name
        if f.type != "int":
            assert got.dtype == DTYPES[str(f.type)]


def test_columns_take_lists_and_views_do_not_copy() -> None:
    tokens: Any = [7, 8, 9]
    data = bytearray(b"".join(map(bytes, StepOutput(3, 10, 20, tokens).encode())))
    output = StepOutput.decode(memoryview(data))
    assert output.token_ids.tolist() == [7, 8, 9]
    data[-16:-12] = (42).to_bytes(4, "little")
    assert output.token_ids[0] == 42


@given(st.lists(st.tuples(*[st.integers(0, 4)] * 4), max_size=6))
def test_entering_rows_have_their_parts_of_the_columns(
    requests: list[tuple[int, int, int, int]],
) -> None:
    """Sizes of each request: tokens in the cache, and tokens, stop ids and controls sent."""
    cached, sent, stops, controls = (np.array([r[i] for r in requests], np.int32) for i in range(4))
    entering = empty_tables(len(requests))
    for name, values in {
        "slot": np.arange(len(requests)),
        "num_known": cached + sent,
        "num_sent": sent,
        "num_stop_ids": stops,
        "num_control_bytes": controls,
    }.items():
        entering[name] = values
    columns = {
        f.name: 0 if f.type == "int" else np.empty(0, DTYPES[str(f.type)])
        for f in fields(StepInput)
    } | {
        "entering": entering,
        "new_token_ids": np.repeat(np.arange(len(requests), dtype=np.int32), sent),
        "new_stop_ids": np.repeat(np.arange(len(requests), dtype=np.int32), stops),
        "new_controls": np.repeat(np.arange(len(requests), dtype=np.uint8), controls),
    }
    step = StepInput(**columns)
    found = [
        (
            (positions.start, positions.stop - positions.start),
            step.new_token_ids[tokens].tolist(),
            step.new_stop_ids[stop_ids].tolist(),
            step.new_controls[control].tolist(),
        )
        for _, positions, tokens, stop_ids, control in step.entering_rows()
    ]
    assert found == [
        ((known, size), [slot] * size, [slot] * num_stops, [slot] * num_controls)
        for slot, (known, size, num_stops, num_controls) in enumerate(requests)
    ]
