"""Records of the engine's steps and requests, as users get them and as they cross a socket.

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
"""Values of RequestRecord.waiting_for."""


def step_kind(num_rows: int, num_prompts: int) -> StepKind:
    """Return what a step computes: next tokens, prompts, or both."""
    return "decode" if num_prompts == 0 else "prompt" if num_prompts == num_rows else "mixed"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step, from the event that let it be scheduled until its tokens were ready to send."""

    step_id: int
    num_rows: int
    num_tokens: int
    """Tokens of its rows, without drafts."""
    num_entered: int
    """Requests that entered with this step."""
    num_prompts: int
    """Rows that compute a prompt, or a chunk of more than one token."""
    num_sampled: int
    """Rows that sampled, or would have if their masks had come in time."""
    num_draft_tokens: int
    """Drafts that its rows verified, beside its tokens."""
    num_accepted_tokens: int
    """Drafts that were accepted. The step gave this many tokens more than rows that sampled."""
    num_running: int
    """Requests that ran when the step had been scheduled."""
    num_waiting: int
    """Requests that waited when the step had been scheduled."""
    num_free_blocks: int
    """KV blocks that were free when the step had been scheduled."""
    ready_ns: int
    """Time at which the core had the output, or the new request, that this step needed."""
    schedule_ns: int
    """Time at which the core began to schedule the step."""
    submit_ns: int
    """Time at which the step had been scheduled, and was sent to the workers."""
    received_ns: int
    """Time at which rank 0 had the step's message."""
    launched_ns: int
    """Time at which rank 0 had queued all of the step's work on the device."""
    start_ns: int
    """Time at which the device began the step."""
    end_ns: int
    """Time at which the device ended the step."""
    taken_ns: int
    """Time at which the core had the step's output."""
    told_ns: int
    """Time at which the tokens were ready to be sent, and the step after next was queued."""
    idle_no_work_ns: int
    """Time for which the device stood still before this step because there was no work."""
    idle_result_ns: int
    """Time for which it stood still while the core waited for the output of an ended step."""
    idle_schedule_ns: int
    """Time for which it stood still while the core scheduled."""
    idle_prepare_ns: int
    """Time for which it stood still while the step was sent, prepared and launched."""

    @property
    def kind(self) -> StepKind:
        """Kind of the step: decode, prompt or mixed."""
        return step_kind(self.num_rows, self.num_prompts)

    @property
    def idle_ns(self) -> int:
        """Time for which the device stood still although there was work."""
        return self.idle_result_ns + self.idle_schedule_ns + self.idle_prepare_ns


STEP_ROW = struct.Struct(f"<{len(fields(StepRecord))}q")
"""Form in which a StepRecord is kept and sent."""


def unpack_steps(data: bytes) -> list[StepRecord]:
    """Return the records of rows of STEP_ROW."""
    return [StepRecord(*row) for row in STEP_ROW.iter_unpack(data)]


class RequestRecord(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The times and counts of one request. Times that have not come yet are None."""

    request_id: str
    client: int
    """Number of the frontend that sent it."""
    status: str
    """One of waiting, running, preempted and finished."""
    waiting_for: WaitReason | None
    """Reason why it does not run now; None if it runs.

    'turn' (others are before it), 'max_num_seqs', 'max_num_batched_tokens' (the next step will have
    room), 'kv_cache', 'output' (a preempted request's last token is in flight), or 'grammar' (it is
    being compiled).
    """
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    arrival_ns: int
    """Time of the call that made it."""
    queued_ns: int
    """Time at which the core had it."""
    scheduled_ns: int | None
    """Time at which it was scheduled first."""
    first_token_ns: int | None
    """Time at which the core had its first token."""
    finished_ns: int | None
    finish_reason: str | None
    replica: int = 0
    """Index of the data-parallel replica that has it, or had it last."""


_requests = msgspec.msgpack.Decoder(list[RequestRecord])


def pack_requests(records: list[RequestRecord]) -> bytes:
    """Return the records as bytes for a socket."""
    return msgspec.msgpack.encode(records)


def unpack_requests(data: bytes) -> list[RequestRecord]:
    """Return the records that pack_requests made bytes of."""
    return _requests.decode(data)
