"""Calls: what the core asks of all its workers beside steps and masks.

A call travels through the same ring as the steps, so each worker takes it between the same two
steps. Every rank answers. A new call takes one struct here and one method of a part in the runners'
`calls`, which has the struct's name in small letters: `StartProfile` is answered by
`TorchProfile.start_profile`.
"""

from __future__ import annotations

import re
from typing import ClassVar, get_args

import msgspec

CallResult = dict[str, str | int | float]
"""The values that one rank answers, by name."""


def _tag(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


class WorkerCall(msgspec.Struct, tag=_tag, array_like=True, frozen=True, kw_only=True):
    """A call. Its class says how the core treats it."""

    timeout_s: ClassVar[float] = 60.0
    """Seconds that the ranks have for their answers, from the moment when the call is sent."""
    awaits_idle: ClassVar[bool] = False
    """Whether the call is sent when all requests have ended.

    Requests that come meanwhile wait until the call is answered.
    """
    drops_prefix_cache: ClassVar[bool] = False
    """Whether the core forgets all cached prefixes when it sends the call."""
    works_asleep: ClassVar[bool] = True
    """Whether a sleeping engine takes the call."""

    @property
    def name(self) -> str:
        """The name of the runners' method that answers the call."""
        return str(self.__struct_config__.tag)


class StartProfile(WorkerCall, frozen=True, kw_only=True):
    """Begin to record what the rank does, with times."""

    folder: str
    """Absolute path of the folder that the recording goes to."""


class StopProfile(WorkerCall, frozen=True, kw_only=True):
    """End the recording and write it to a file, whose path is the result's 'file'."""

    timeout_s = 600.0


class MemoryUse(WorkerCall, frozen=True, kw_only=True):
    """Tell the bytes of memory that the rank uses on its device, by what they are used for."""


class Sleep(WorkerCall, frozen=True, kw_only=True):
    """Free the memory of the weights and of the KV cache, as far as the level says.

    The result's 'freed_bytes' are those of the device.
    """

    timeout_s = 600.0
    awaits_idle = True
    drops_prefix_cache = True
    works_asleep = False

    level: int
    """1 keeps the weights in the host's memory; 2 drops them."""


class WakeUp(WorkerCall, frozen=True, kw_only=True):
    """End a sleep. A rank that does not sleep has nothing to do."""

    timeout_s = 1800.0


class PrepareWeights(WorkerCall, frozen=True, kw_only=True):
    """Read weights from a folder into the host's memory, and check their names and shapes."""

    timeout_s = 1800.0
    works_asleep = False

    folder: str
    """Absolute path of the folder with safetensors files."""


class ApplyWeights(WorkerCall, frozen=True, kw_only=True):
    """Use the weights that `PrepareWeights` has read, from the next step on."""

    timeout_s = 600.0
    drops_prefix_cache = True
    works_asleep = False

    folder: str
    """The folder that they were read from."""


class DropWeights(WorkerCall, frozen=True, kw_only=True):
    """Forget the weights that `PrepareWeights` has read."""


AnyCall = (
    StartProfile
    | StopProfile
    | MemoryUse
    | Sleep
    | WakeUp
    | PrepareWeights
    | ApplyWeights
    | DropWeights
)
ALL_CALLS: tuple[type[WorkerCall], ...] = get_args(AnyCall)


class CallAnswer(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The answer of one rank to a call."""

    number: int
    """The number with which the call was sent."""
    result: CallResult = {}
    error: str | None = None
    """Why the rank has refused the call; then nothing has changed there."""


class SentCall(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """A call in the ring."""

    number: int
    call: AnyCall


_encoder = msgspec.msgpack.Encoder()
_calls: msgspec.msgpack.Decoder[SentCall] = msgspec.msgpack.Decoder(SentCall)
_answers: msgspec.msgpack.Decoder[CallAnswer] = msgspec.msgpack.Decoder(CallAnswer)


def encode(message: SentCall | CallAnswer) -> bytes:
    """Return the message as bytes."""
    return _encoder.encode(message)


def decode_call(data: bytes | memoryview) -> SentCall:
    """Return a call; it holds no view of `data`."""
    return _calls.decode(data)


def decode_answer(data: bytes | memoryview) -> CallAnswer:
    """Return a rank's answer; it holds no view of `data`."""
    return _answers.decode(data)
