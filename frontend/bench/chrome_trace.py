"""The conversion of the flight recorder's records to a Chrome trace.

Perfetto (ui.perfetto.dev) and chrome://tracing show it. There is one track a process, and one for
the device: a person sees step N+1 being scheduled and packed under step N. Requests are on a track
of their own, each from its arrival to its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sidestep.frontend.output.output_processor import Delivery
from sidestep.ipc.transport.records import RequestRecord, StepRecord

Event = dict[str, Any]
FRONTEND, CORE, WORKER, DEVICE, REQUESTS = range(1, 6)
_TRACKS = {CORE: "engine core", WORKER: "worker 0", DEVICE: "device", REQUESTS: "requests"}
"""The tracks of one replica; those of the next replica follow."""


def chrome_trace(
    steps: Sequence[Sequence[StepRecord]],
    requests: Iterable[RequestRecord],
    deliveries: Iterable[Delivery],
) -> dict[str, Any]:
    """Return the trace as a JSON object, whose times begin with the first step.

    steps: the steps of each replica.
    """
    origin = min((of_one[0].ready_ns for of_one in steps if of_one), default=0)
    last = max((of_one[-1].told_ns for of_one in steps if of_one), default=0)
    events = list(_names(len(steps)))
    events += [
        event
        for replica, of_one in enumerate(steps)
        for step in of_one
        for event in _step_events(step, origin, len(_TRACKS) * replica)
    ]
    events += [
        _span(FRONTEND, "deliver", d.start_ns, d.end_ns, origin, tokens=d.num_tokens)
        for d in deliveries
        if d.end_ns >= origin
    ]
    for number, request in enumerate(requests):
        if request.finished_ns is None or request.finished_ns >= origin:
            events += _request_events(number, request, origin, last)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(num_replicas: int) -> Iterator[Event]:
    names = {FRONTEND: "frontend"}
    for replica in range(num_replicas):
        suffix = f" of replica {replica}" if num_replicas > 1 else ""
        names |= {track + len(_TRACKS) * replica: name + suffix for track, name in _TRACKS.items()}
    for order, (track, name) in enumerate(names.items()):
        yield {"ph": "M", "pid": track, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": track, "name": "process_sort_index", "args": {"sort_index": order}}


def _span(track: int, name: str, start_ns: int, end_ns: int, origin: int, **args: Any) -> Event:
    return {
        "ph": "X",
        "pid": track,
        "tid": 0,
        "name": name,
        "ts": (start_ns - origin) / 1e3,
        "dur": max(0, end_ns - start_ns) / 1e3,
        "args": args,
    }


def _step_events(step: StepRecord, origin: int, tracks: int) -> Iterator[Event]:
    """Yield the events of a step; tracks: the offset of the replica's track numbers."""
    name = f"step {step.step_id}"
    yield _span(
        tracks + CORE,
        f"schedule {name}",
        step.schedule_ns,
        step.submit_ns,
        origin,
        running=step.num_running,
        waiting=step.num_waiting,
        free_blocks=step.num_free_blocks,
    )
    yield _span(tracks + WORKER, f"prepare {name}", step.received_ns, step.launched_ns, origin)
    yield _span(
        tracks + DEVICE,
        name,
        step.start_ns,
        step.end_ns,
        origin,
        rows=step.num_rows,
        tokens=step.num_tokens,
        kind=step.kind,
        entered=step.num_entered,
        sampled=step.num_sampled,
        drafted=step.num_draft_tokens,
        accepted=step.num_accepted_tokens,
        idle_before_us={
            "no work": step.idle_no_work_ns / 1e3,
            "result": step.idle_result_ns / 1e3,
            "schedule": step.idle_schedule_ns / 1e3,
            "prepare": step.idle_prepare_ns / 1e3,
        },
    )
    yield _span(tracks + CORE, f"take {name}", step.taken_ns, step.told_ns, origin)


def _request_events(number: int, request: RequestRecord, origin: int, last: int) -> Iterator[Event]:
    """Yield the events of a request.

    They are spans of one asynchronous track: waiting, prompt and output.
    """
    end = request.finished_ns if request.finished_ns is not None else last
    times = [request.arrival_ns, request.scheduled_ns, request.first_token_ns, end]
    args = {
        "request": request.request_id,
        "prompt": request.num_prompt_tokens,
        "cached": request.num_cached_tokens,
        "output": request.num_output_tokens,
        "preemptions": request.num_preemptions,
        "waits for": request.waiting_for,
        "finish": request.finish_reason,
    }
    for index, name in enumerate(("waiting", "prompt", "output")):
        start = times[index]
        if start is None:
            return
        stop = next(t for t in times[index + 1 :] if t is not None)
        common = {
            "pid": REQUESTS + len(_TRACKS) * request.replica,
            "tid": 0,
            "cat": "request",
            "id": number,
            "name": name,
        }
        yield {**common, "ph": "b", "ts": (start - origin) / 1e3, "args": args}
        yield {**common, "ph": "e", "ts": (max(start, stop) - origin) / 1e3}
