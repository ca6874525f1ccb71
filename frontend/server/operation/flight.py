"""GET /v1/flight: the flight recorder for clients that watch the engine live, in bounded pieces.

A client polls, each time from the step where the last answer ended. The cost of an answer is
bounded, in the core too. An answer holds at most the newest MOST_STEPS steps, and in each state at
most the oldest MOST_REQUESTS requests. All times are microseconds of one monotonic clock; `now_us`
is the time at which the answer was made.
"""

from __future__ import annotations

import asyncio
import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sidestep.frontend.server.observe.window import Percentiles, percentiles
from sidestep.frontend.server.service.service import Service
from sidestep.frontend.server.transport.errors import refused
from sidestep.frontend.server.transport.guard import OPERATOR, TENANT
from sidestep.ipc.common.errors import EngineDeadError, EngineStalledError
from sidestep.ipc.transport.records import RequestRecord, StepKind, StepRecord, WaitReason

MOST_STEPS = 256
"""Largest number of steps of an answer."""
MOST_REQUESTS = 64
"""Largest number of running requests of an answer, and of waiting requests."""
_IN_FLIGHT = 2
"""Number of steps that were scheduled and whose results may be missing still."""


class FlightIdle(msgspec.Struct):
    """Microseconds for which the device was idle before a step, by cause.

    See docs/architecture.md.
    """

    no_work: int
    result: int
    schedule: int
    prepare: int


class FlightStep(msgspec.Struct):
    """One step of the engine.

    Its rows gave `num_sampled + num_accepted_tokens` tokens.

    The core scheduled the step from `schedule_us` to `submit_us`. The worker prepared and launched
    it from `received_us` to `launched_us`, and the device ran it from `start_us` to `end_us`. The
    core received its output at `taken_us` and had its tokens ready for the frontend at `told_us`.
    """

    step: int
    kind: StepKind
    num_rows: int
    num_tokens: int
    num_sampled: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    schedule_us: int
    submit_us: int
    received_us: int
    launched_us: int
    start_us: int
    end_us: int
    taken_us: int
    told_us: int
    idle_us: FlightIdle


class FlightRequest(msgspec.Struct):
    """One request that has not ended."""

    request_id: str
    """Empty for a request of another user, unless the caller has an operator's key."""
    status: str
    """State of the request: waiting, running or preempted."""
    waiting_for: WaitReason | None
    """Reason why the request waits; None while it runs."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    arrival_us: int
    scheduled_us: int | None


class FlightReplica(msgspec.Struct):
    """One replica of the engine."""

    replica: int
    dead: str | None
    """Cause of the replica's death; None while it lives."""
    stalled: str | None
    """Why the replica counts as stalled: it lives and makes no progress."""
    restarting: str | None = None
    """Cause of the replica's death while it is being started again."""


class Flight(msgspec.Struct):
    """Answer to /v1/flight, for one replica."""

    replica: int
    replicas: list[FlightReplica]
    """All replicas of the engine."""
    now_us: int
    next: int
    """Value of `since` for the client's next request."""
    model: str
    device: str
    num_kv_blocks: int
    block_size: int
    kv_cache_usage: float
    """Share of the KV cache that is held, from 0 to 1."""
    num_running: int
    num_waiting: int
    steps: list[FlightStep]
    """Newest steps of the replica, oldest first."""
    requests: list[FlightRequest]
    """Running requests, then waiting requests."""
    ttft_s: Percentiles
    """Seconds to the first token, of this server's last requests."""
    itl_s: Percentiles
    """Seconds between two tokens, of this server's last streams."""


class FlightRoute:
    """Route of /v1/flight."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, http: Request) -> Response:
        """Answer with the steps and requests of one replica."""
        since, wanted = _numbers(http)
        service, llm = self._service, self._service.llm
        if wanted is not None and wanted >= len(llm.replicas):
            raise refused("replica", f"must be below {len(llm.replicas)}, not {wanted}")
        alive = await service.stats()
        replica = min(alive) if wanted is None else wanted
        stats, status = alive.get(replica), llm.replicas[replica]
        if status.dead is not None or status.ready is None:
            raise EngineDeadError(f"replica {replica}: {status.dead}")
        if stats is None:
            raise EngineStalledError(f"replica {replica}: the engine core does not answer")
        scheduled = int(stats["num_steps"])
        # `since` may come from an earlier engine and be larger than any step of this one: then the
        # client begins at the first step.
        first = max(0, scheduled - _IN_FLIGHT - MOST_STEPS, since if since <= scheduled else 0)
        records, requests, figures = await asyncio.gather(
            llm.get_step_records(first, replica=replica),
            llm.get_request_records(MOST_REQUESTS),
            service.figures(),
        )
        records = records[-MOST_STEPS:]
        own = None if http.scope[OPERATOR] else service.request_ids(http.scope[TENANT])
        body = Flight(
            replica=replica,
            replicas=[
                FlightReplica(each.number, each.dead, each.stalled, each.restarting)
                for each in llm.replicas
            ],
            now_us=time.monotonic_ns() // 1000,
            next=records[-1].step_id + 1 if records else min(first, scheduled),
            model=service.names[0],
            device=status.ready.device,
            num_kv_blocks=status.ready.num_kv_blocks,
            block_size=status.ready.block_size,
            kv_cache_usage=stats["kv_cache_usage"],
            num_running=int(stats["num_running"]),
            num_waiting=int(stats["num_waiting"]),
            steps=[_step(record) for record in records],
            requests=[
                _request(record, own is None or record.request_id in own)
                for record in requests
                if record.finished_ns is None and record.replica == replica
            ],
            ttft_s=percentiles(figures.last_ttfts),
            itl_s=percentiles(figures.last_gaps),
        )
        return Response(
            msgspec.json.encode(body),
            media_type="application/json",
            headers={"cache-control": "no-store"},
        )


def _numbers(http: Request) -> tuple[int, int | None]:
    """Return the step to begin with, and the replica if one is named. Raises ApiError."""
    for name in http.query_params:
        if name not in ("since", "replica"):
            raise refused(name, "is no parameter of this route", "unknown_field")
    return _number(http, "since", "a step's") or 0, _number(http, "replica", "a replica's")


def _number(http: Request, name: str, whose: str) -> int | None:
    given = http.query_params.getlist(name)
    if not given:
        return None
    if len(given) > 1 or not given[0].isascii() or not given[0].isdigit() or len(given[0]) > 18:
        raise refused(name, f"must be {whose} number, not {', '.join(given)[:40]!r}")
    return int(given[0])


def _step(record: StepRecord) -> FlightStep:
    return FlightStep(
        record.step_id,
        record.kind,
        record.num_rows,
        record.num_tokens,
        record.num_sampled,
        record.num_draft_tokens,
        record.num_accepted_tokens,
        record.num_running,
        record.num_waiting,
        record.num_free_blocks,
        record.schedule_ns // 1000,
        record.submit_ns // 1000,
        record.received_ns // 1000,
        record.launched_ns // 1000,
        record.start_ns // 1000,
        record.end_ns // 1000,
        record.taken_ns // 1000,
        record.told_ns // 1000,
        FlightIdle(
            record.idle_no_work_ns // 1000,
            record.idle_result_ns // 1000,
            record.idle_schedule_ns // 1000,
            record.idle_prepare_ns // 1000,
        ),
    )


def _request(record: RequestRecord, with_name: bool) -> FlightRequest:
    return FlightRequest(
        record.request_id if with_name else "",
        record.status,
        record.waiting_for,
        record.num_prompt_tokens,
        record.num_cached_tokens,
        record.num_output_tokens,
        record.num_preemptions,
        record.arrival_ns // 1000,
        None if record.scheduled_ns is None else record.scheduled_ns // 1000,
    )
