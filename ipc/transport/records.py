"""What the engine remembers of its steps and requests, as people get it and as it crosses a socket.

All times are nanoseconds of the monotonic clock that the processes of one machine share.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from typing import Literal, get_args

import msgspec

StepKind = Literal["decode", "prompt", "mixed"]
STEP_KINDS: tuple[StepKind, ...] = get_args(StepKind)
WaitReason = Literal[
    "turn", "max_num_seqs", "max_num_batched_tokens", "kv_cache", "output", "grammar"
]
WAIT_REASONS: tuple[WaitReason, ...] = get_args(WaitReason)
"""See RequestRecord.waiting_for."""


def step_kind(num_rows: int, num_prompts: int) -> StepKind:
    """What a step does: next tokens, prompts, or both."""
    return "decode" if num_prompts == 0 else "prompt" if num_prompts == num_rows else "mixed"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step, from the event that let it be scheduled to the moment its tokens were ready to be
    told.
    """

    step_id: int
    num_rows: int
    num_tokens: int
    num_entered: int
    """Requests that came in with this step."""
    num_prompts: int
    """Rows that compute a prompt, or a chunk of one of more than a token."""
    num_sampled: int
    """Rows that gave a token, or would have if their masks had come in time."""
    num_running: int
    num_waiting: int
    num_free_blocks: int
    """Requests and KV blocks when the step had been scheduled."""
    ready_ns: int
    """The core knew what it needed for this step: the output it had waited for, or a new
    request."""
    schedule_ns: int
    """The core began to schedule it."""
    submit_ns: int
    """It had been scheduled, and was sent to the workers."""
    received_ns: int
    """Rank 0 had it."""
    launched_ns: int
    """Rank 0 had queued all of its work on the device."""
    start_ns: int
    end_ns: int
    """The device's part."""
    taken_ns: int
    """The core had its output."""
    told_ns: int
    """Its tokens were ready to be sent, and the step after next was queued."""
    idle_no_work_ns: int
    """How long the device had stood still before this step, by cause: there was nothing to do;"""
    idle_result_ns: int
    """the core waited for the output of a step that had ended;"""
    idle_schedule_ns: int
    """the core scheduled;"""
    idle_prepare_ns: int
    """the step travelled to the worker, was prepared and launched."""

    @property
    def kind(self) -> StepKind:
        """decode, prompt or mixed."""
        return step_kind(self.num_rows, self.num_prompts)

    @property
    def idle_ns(self) -> int:
        """How long the device stood still although there was work."""
        return self.idle_result_ns + self.idle_schedule_ns + self.idle_prepare_ns


STEP_ROW = struct.Struct(f"<{len(fields(StepRecord))}q")
"""A StepRecord as it is kept and sent."""


def unpack_steps(data: bytes) -> list[StepRecord]:
    """Rows of STEP_ROW, one after the other."""
    return [StepRecord(*row) for row in STEP_ROW.iter_unpack(data)]


class RequestRecord(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """One request's life. Times that have not come yet are None."""

    request_id: str
    client: int
    """Number of the frontend that sent it."""
    status: str
    """waiting, running, preempted or finished."""
    waiting_for: WaitReason | None
    """What keeps it from running now: 'turn' (others are before it), 'max_num_seqs',
    'max_num_batched_tokens' (the next step will have room), 'kv_cache', 'output' (a preempted
    request's last token is on its way), or 'grammar' (it is being compiled)."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    arrival_ns: int
    """The call that made it."""
    queued_ns: int
    """The core had it."""
    scheduled_ns: int | None
    """It was scheduled for the first time."""
    first_token_ns: int | None
    """The core had its first token."""
    finished_ns: int | None
    finish_reason: str | None
    replica: int = 0
    """Which data-parallel replica has it, or had it last."""


_requests = msgspec.msgpack.Decoder(list[RequestRecord])


def pack_requests(records: list[RequestRecord]) -> bytes:
    """For a socket."""
    return msgspec.msgpack.encode(records)


def unpack_requests(data: bytes) -> list[RequestRecord]:
    """What pack_requests made."""
    return _requests.decode(data)
