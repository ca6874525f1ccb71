"""Messages between a frontend and the engine core: msgspec structs, tagged and array-like.

A request is known to the core by (client, handle): the handle is a number that its frontend chose.
The core's message of a step is columnar, one message for all requests of one frontend.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Literal

import msgspec
import numpy as np

from sidestep.ipc.params.beam_search_params import BeamSearchParams
from sidestep.ipc.params.pooling_params import PoolingType
from sidestep.ipc.params.sampling_params import SamplingParams
from sidestep.ipc.params.structured_outputs_params import Grammar
from sidestep.ipc.transport.step import Int32
from sidestep.ipc.transport.worker_calls import AnyCall, CallResult


class FinishReason(enum.IntEnum):
    """Why a request ended; `str()` gives the word users see."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()


# Frontend to core.


class AddRequest(msgspec.Struct, tag=True, array_like=True, frozen=True, kw_only=True):
    """A new request, already checked by the frontend."""

    client: int
    handle: int
    """Handle of the first completion; the others' handles follow it."""
    request_id: str
    """Name of the request, for logs only."""
    prompt_token_ids: bytes
    """Tokens of the prompt as int32, little-endian."""
    output_token_ids: bytes = b""
    """Tokens, as int32, that it has produced at a replica that has died.

    The request goes on like one that was preempted.
    """
    sampling: SamplingParams
    """Parameters with `seed` and `max_tokens` filled in, and without `structured_outputs`."""
    arrival: float
    """time.monotonic() of the call."""
    priority: int = 0
    cache_salt: str | None = None
    num_public_tokens: int = 0
    """Number of its first tokens that share cached blocks as if it had no salt."""
    deadline: float | None = None
    """time.monotonic() after which the request is ended."""
    controls: bytes = b""
    """Encoded controls for the workers; see ipc/params/logits_controls.py."""
    beam_search: BeamSearchParams | None = None
    """Parameters of the beam search to run instead of sampling."""
    grammar: Grammar | None = None
    """Grammar that its output must follow."""
    pooling: PoolingType | None = None
    """How its vector is made of its tokens' states; None for a request that generates text."""


class AbortRequests(msgspec.Struct, tag=True, array_like=True, frozen=True, kw_only=True):
    """The end of these requests; handles that have ended already are ignored."""

    client: int
    handles: list[int]


class Call(msgspec.Struct, tag=True, array_like=True, frozen=True, kw_only=True):
    """A question or command to the core itself; answered by `Answer` with the same `call_id`."""

    client: int
    call_id: int
    method: str
    """One of 'reset_prefix_cache', 'ping', 'stats', 'sleep_level', 'step_records',
    'request_records'."""
    since: int = 0
    """The first step that is wanted, for step_records."""
    limit: int | None = None
    """The most records that are wanted of each state, for request_records; None for all."""


class Connect(msgspec.Struct, tag=True, array_like=True, frozen=True, kw_only=True):
    """The address of another frontend, which the core will serve too.

    It is answered by `Answer` with the frontend's number as 'client'.
    """

    client: int
    call_id: int
    to_core: str
    from_core: str
    server_key: str | None = None
    """The public key of the frontend's ports; None for socket files."""


class CallWorkers(msgspec.Struct, tag=True, array_like=True, frozen=True, kw_only=True):
    """A call to all workers; answered by `Answer` when all of them have answered."""

    client: int
    call_id: int
    call: AnyCall
    wait_s: float = 60.0
    """Seconds for which a call that awaits the end of all requests waits for it."""


class CancelCall(msgspec.Struct, tag=True, array_like=True, frozen=True, kw_only=True):
    """The caller of `CallWorkers` has left: the call is dropped if it has not been sent."""

    client: int
    call_id: int


ToCore = AddRequest | AbortRequests | Call | Connect | CallWorkers | CancelCall


# Core to frontend.


class Ready(msgspec.Struct, tag=True, array_like=True, frozen=True, kw_only=True):
    """The engine serves from now on."""

    max_model_len: int
    num_kv_blocks: int
    block_size: int
    device: str
    """A description for people."""
    device_type: str = "fake"
    """'cuda', 'cpu' or 'fake'."""
    core_pid: int
    worker_pids: list[int]
    """The process ids of the ranks on the core's own host."""
    hosts: dict[str, str] = {}
    """Names of the hosts that have its ranks -> their addresses; empty for this machine."""


class Dead(msgspec.Struct, tag=True, array_like=True, frozen=True, kw_only=True):
    """The engine cannot go on (or could not start); the last message on the channel."""

    cause: str
    origin: Literal["core", "worker", "stall"] = "worker"
    """The process that has failed; 'stall' if the workers hung."""
    is_final: bool = False
    """Whether starting it again would be useless."""


class Started(msgspec.Struct, tag=True, array_like=True, frozen=True, kw_only=True):
    """First scheduling of a request."""

    handle: int
    num_cached_tokens: int
    scheduled: float
    """time.monotonic()"""


class Beam(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """A continuation that beam search has found."""

    token_ids: bytes
    """Tokens as int32, without the prompt."""
    logprob: float
    """Cumulative log-probability of all its tokens."""
    score: float
    """logprob / length ** length_penalty"""
    reason: FinishReason
    """STOP if it ends with an end-of-sequence token, else LENGTH."""


class VerifiedDrafts(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The drafts that a request has verified."""

    num_drafts: int
    """Steps in which it verified drafts."""
    num_draft_tokens: int
    num_accepted_tokens: int


class Finished(msgspec.Struct, tag=True, array_like=True, frozen=True, kw_only=True):
    """The end of a request.

    Its last tokens, if this step gave any, are in the same message's columns.
    """

    handle: int
    reason: FinishReason
    stop_reason: int | str | None = None
    """The stop token's id, or a word such as 'deadline'."""
    error: str | None = None
    field: str | None = None
    """Name of the request's field that is at fault, with an error."""
    num_preemptions: int = 0
    beams: list[Beam] = []
    """Continuations of a beam search, the best first."""
    completes_grammar: bool = False
    """Whether it stopped because its grammar allows nothing more.

    Its last token is then text, and no stop token.
    """
    drafts: VerifiedDrafts | None = None
    """None for a request that has no drafts, as without speculation."""


class Outputs(msgspec.Struct, tag=True, array_like=True, frozen=True, kw_only=True):
    """The outputs of one step for one frontend's requests."""

    handles: bytes
    """Handles, as int32, of the requests that got a token.

    The handle of a request that got several tokens comes several times in a row.
    """
    token_ids: bytes
    """Tokens as int32, one for each of `handles`."""
    started: list[Started] = []
    finished: list[Finished] = []
    logprobs: bytes = b""
    """LogprobColumns of the tokens whose requests asked, in their order; keys are handles."""
    prompt_logprobs: bytes = b""
    """LogprobColumns of prompts, chunk by chunk; after a preemption some come again."""
    pooled: bytes = b""
    """Handles, as int32, of the requests that got a vector, which is their only output."""
    vectors: bytes = b""
    """Their vectors as float32, one after the other and all of the same length."""


class Answer(msgspec.Struct, tag=True, array_like=True, frozen=True, kw_only=True):
    """The result of a `Call` or of `CallWorkers`."""

    call_id: int
    result: dict[str, float] | None = None
    results: list[CallResult] = []
    """One a rank, in their order, for `CallWorkers`; empty if the workers had nothing to do."""
    records: bytes = b""
    """Records for 'step_records' and 'request_records'; see ipc/transport/records.py."""
    error: str | None = None
    now_ns: int | None = None
    """The core's monotonic time at the answer, for a frontend on another host."""


class WorkersChanged(msgspec.Struct, tag=True, array_like=True, frozen=True, kw_only=True):
    """The changes that calls have made to the workers, for who starts the core again."""

    sleep_level: int = 0
    """0 while they are awake."""
    weights: str | None = None
    """Folder of the weights in use; None for those of the start."""


ToFrontend = Ready | Dead | Outputs | Answer | WorkersChanged

_encoder = msgspec.msgpack.Encoder()
_to_core: msgspec.msgpack.Decoder[ToCore] = msgspec.msgpack.Decoder(ToCore)
_to_frontend: msgspec.msgpack.Decoder[ToFrontend] = msgspec.msgpack.Decoder(ToFrontend)


def encode(message: ToCore | ToFrontend) -> bytes:
    """Return the message as bytes."""
    return _encoder.encode(message)


def decode_to_core(data: bytes | memoryview) -> ToCore:
    """Return a frontend's message. Raises msgspec.DecodeError (a ValueError) for other bytes."""
    return _to_core.decode(data)


def decode_to_frontend(data: bytes | memoryview) -> ToFrontend:
    """Return the core's message. Raises msgspec.DecodeError (a ValueError) for other bytes."""
    return _to_frontend.decode(data)


def pack_ids(ids: Iterable[int]) -> bytes:
    """Return integers as an int32 column."""
    return np.fromiter(ids, np.int32).tobytes()


def unpack_ids(column: bytes) -> Int32:
    """Return a column as an array over the same bytes."""
    return np.frombuffer(column, np.int32)
