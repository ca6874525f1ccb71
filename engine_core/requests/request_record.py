"""The record of a request, for users."""

from __future__ import annotations

from sidestep.engine_core.requests.request import Request
from sidestep.ipc.transport.records import RequestRecord, WaitReason


def make_record(
    request: Request,
    *,
    waiting_for: WaitReason | None = None,
    finished: float | None = None,
    reason: str | None = None,
) -> RequestRecord:
    """Return what users see of a request."""

    def nanoseconds(time: float | None) -> int | None:
        return None if time is None else int(time * 1e9)

    timing = request.timing
    return RequestRecord(
        request_id=request.request_id,
        client=request.client,
        status=request.status.name.lower(),
        waiting_for=waiting_for,
        num_prompt_tokens=request.num_prompt,
        num_cached_tokens=request.num_cached_tokens,
        num_output_tokens=request.num_outputs,
        num_preemptions=request.num_preemptions,
        arrival_ns=int(timing.arrival * 1e9),
        queued_ns=int(timing.queued * 1e9),
        scheduled_ns=nanoseconds(timing.scheduled),
        first_token_ns=nanoseconds(timing.first_token),
        finished_ns=nanoseconds(finished),
        finish_reason=reason,
    )
