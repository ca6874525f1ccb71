"""`sidestep trace --crash FILE`, which tells what a replica did before it died."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from sidestep.frontend.bench.bench import print_table
from sidestep.frontend.bench.chrome_trace import CORE, REQUESTS, Event, chrome_trace
from sidestep.frontend.output.output_processor import Delivery
from sidestep.frontend.replicas.crash_file import Crash, read_crash
from sidestep.ipc.transport.records import step_kind

_MOST_NAMES = 20
"""Requests that are named; the file has all."""


def run_crash_report(parsed: argparse.Namespace) -> int:
    """Print the report, write the file for Perfetto, and return the exit status."""
    crash = read_crash(parsed.crash)
    print_table(summary(crash))
    for line in details(crash):
        print(line)
    with open(parsed.output, "w") as file:
        json.dump(crash_trace(crash), file)
    print(f"{parsed.output} can be opened in ui.perfetto.dev")
    return 0


def summary(crash: Crash) -> dict[str, float | str]:
    """Return the figures for people."""
    steps = crash.step_records
    since = {"seconds_since_a_step": _seconds(crash, steps[-1].taken_ns)} if steps else {}
    model = crash.options.get("model", {}).get("model", "")
    return {
        "time": crash.time,
        "replica": crash.replica,
        "cause": crash.cause.splitlines()[0],
        "origin": crash.origin,
        "model": str(model),
        "device": crash.device,
        **crash.versions,
        "steps": len(steps),
        **since,
        "requests": len(crash.requests),
    }


def details(crash: Crash) -> Iterator[str]:
    """Yield a line for each step in flight, and for each of the first requests."""
    for flight in crash.flights:
        kind = step_kind(flight.num_rows, flight.num_prompts)
        yield (
            f"step {flight.step_id} was in flight: {kind}, {flight.num_rows} rows, "
            f"{flight.num_tokens} tokens, submitted {_seconds(crash, flight.submit_ns):.3f} s "
            "before the death"
        )
    for request in crash.requests[:_MOST_NAMES]:
        state = (
            "waited"
            if request.scheduled_ns is None
            else f"ran for {_seconds(crash, request.scheduled_ns):.3f} s"
        )
        yield (
            f"request {request.request_id} of frontend {request.frontend}: {state}, "
            f"{request.num_prompt_tokens} tokens in its prompt"
        )
    if (more := len(crash.requests) - _MOST_NAMES) > 0:
        yield f"and {more} more requests"


def _seconds(crash: Crash, at_ns: int) -> float:
    return (crash.time_ns - at_ns) / 1e9


def crash_trace(crash: Crash) -> dict[str, Any]:
    """Return the trace for Perfetto: the last steps, those in flight, the requests, the death."""
    steps = crash.step_records
    trace = chrome_trace([steps], [], [Delivery(*one) for one in crash.deliveries])
    begins = [*(s.ready_ns for s in steps[:1]), *(f.ready_ns for f in crash.flights)]
    trace["traceEvents"] += _last_events(crash, min(begins, default=crash.time_ns))
    return trace


def _last_events(crash: Crash, origin: int) -> Iterator[Event]:
    death = (crash.time_ns - origin) / 1e3
    yield {"ph": "i", "s": "g", "pid": CORE, "tid": 0, "name": "death", "ts": death}
    spans = [
        (CORE, "step", f"step {flight.step_id} in flight", flight.step_id, flight.submit_ns)
        for flight in crash.flights
    ] + [
        (REQUESTS, "request", request.request_id, number, request.arrival_ns)
        for number, request in enumerate(crash.requests)
    ]
    for track, category, name, number, begin in spans:
        common = {"pid": track, "tid": 0, "cat": category, "id": number, "name": name}
        yield {**common, "ph": "b", "ts": (begin - origin) / 1e3}
        yield {**common, "ph": "e", "ts": death}
