"""A core that a test plays: it keeps the frontend's messages and sends the test's."""

from __future__ import annotations

import itertools
import socket
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sidestep import AsyncLLM
from sidestep.frontend.api.async_llm import _close
from sidestep.frontend.input.input_processor import InputProcessor
from sidestep.frontend.input.tokenizer import Tokenizer
from sidestep.frontend.options.engine_args import EngineArgs
from sidestep.frontend.output.output_processor import OutputProcessor
from sidestep.frontend.replicas.engine_client import EngineClient
from sidestep.frontend.replicas.replica_set import ReplicaSet
from sidestep.ipc.common.errors import EngineDeadError
from sidestep.ipc.config import EngineConfig
from sidestep.ipc.frontend_config import FrontendConfig
from sidestep.ipc.processes.addresses import ClientAddress
from sidestep.ipc.transport.channels import Broken
from sidestep.ipc.transport.messages import (
    AbortRequests,
    AddRequest,
    Answer,
    Call,
    Finished,
    FinishReason,
    Outputs,
    Ready,
    ToCore,
    ToFrontend,
    pack_ids,
)


class FakeChannel:
    """A stand-in for ipc.transport.channels.FrontendChannel."""

    def __init__(self) -> None:
        self.address = ClientAddress("", "")
        self.sent: list[ToCore] = []
        self.sent_together: list[int] = []
        """Numbers of messages that came at once."""
        self._waiting: list[ToFrontend | Broken] = []
        self.is_open = True
        self._bell, self._ring = socket.socketpair()
        self._bell.setblocking(False)
        self._leaving, self._left = socket.socketpair()
        self.gone = False
        self.num_refused = 0

    def wait_message(self, timeout_s: float) -> ToFrontend | Broken | None:
        return self._waiting.pop(0) if self._waiting else None

    def seal(self) -> None:
        pass

    def send(self, *messages: ToCore) -> None:
        self.sent_together.append(len(messages))
        for message in messages:
            if isinstance(message, Call) and message.method == "idle":
                self.say(Answer(call_id=message.call_id, result={"idle": 1.0}))
            else:
                self.sent.append(message)

    def fileno(self) -> int:
        return self._bell.fileno()

    def receive(self) -> list[ToFrontend | Broken]:
        try:
            self._bell.recv(4096)
        except BlockingIOError:
            pass
        waiting, self._waiting = self._waiting, []
        return waiting

    def gone_fileno(self) -> int:
        return self._leaving.fileno()

    def core_is_gone(self) -> bool:
        return self.gone

    def close(self) -> None:
        self.is_open = False
        for end in (self._bell, self._ring, self._leaving, self._left):
            end.close()

    # Messages that a test sends as the core.

    def say(self, message: ToFrontend | Broken) -> None:
        self._waiting.append(message)
        self._ring.send(b"x")

    def say_tokens(
        self, *tokens: tuple[int, int], finished: Iterable[tuple[int, FinishReason]] = ()
    ) -> None:
        """Send the output of one step: (handle, token) pairs."""
        self.say(
            Outputs(
                handles=pack_ids(h for h, _ in tokens),
                token_ids=pack_ids(t for _, t in tokens),
                finished=[Finished(handle=h, reason=r) for h, r in finished],
            )
        )

    @property
    def added(self) -> list[AddRequest]:
        return [m for m in self.sent if isinstance(m, AddRequest)]

    @property
    def aborted(self) -> list[int]:
        return [h for m in self.sent if isinstance(m, AbortRequests) for h in m.handles]


def client_of(channel: FakeChannel) -> EngineClient:
    """Return a client without a core's process."""
    processor = OutputProcessor(lambda handles: None)
    return EngineClient(
        channel,
        processor.handle,
        lambda death: processor.fail_all(EngineDeadError(death.cause)),
    )


def llm_of(
    channel: FakeChannel,
    tokenizer: Tokenizer,
    max_model_len: int = 100,
    *others: FakeChannel,
    restart_limit: int = 0,
    stall_limit: float = 0.0,
    open_channel: Callable[[], FakeChannel] = FakeChannel,
) -> AsyncLLM:
    """Return an AsyncLLM whose core is the test; or cores, one a replica.

    open_channel: makes the channel of a core that is started again.
    """
    channels = dict(enumerate((channel, *others)))
    made = AsyncLLM.__new__(AsyncLLM)
    llm: Any = made
    llm._outputs = OutputProcessor(lambda handles: llm._replicas.abort(handles))
    llm._config = EngineArgs(
        device="fake",
        data_parallel_size=len(channels),
        restart_limit=restart_limit,
        stall_limit=stall_limit,
    ).create_engine_config()
    llm._replicas = replicas_of(channels, llm._outputs, llm._config, max_model_len, open_channel)
    llm._home = llm._replicas.home
    llm._finalizer = weakref.finalize(llm, _close, llm._replicas)
    llm._tokenizer = tokenizer
    llm._inputs = input_processor(tokenizer, max_model_len)
    llm._handles = itertools.count()
    llm._limits = FrontendConfig()
    llm._preparing = {}
    return made


def replicas_of(
    channels: Mapping[int, FakeChannel],
    outputs: OutputProcessor,
    config: EngineConfig,
    max_model_len: int = 100,
    open_channel: Callable[[], FakeChannel] = FakeChannel,
) -> ReplicaSet:
    """Return replicas that a test plays, and that have said they are ready."""
    replicas = ReplicaSet(
        config,
        outputs,
        {number: (channel, 0) for number, channel in channels.items()},
        open_channel=open_channel,
    )
    for number, channel in channels.items():
        channel.say(ready(number, max_model_len))
    replicas.wait_ready()
    return replicas


def ready(core_pid: int, max_model_len: int = 100) -> Ready:
    """Return a core's first message."""
    return Ready(
        max_model_len=max_model_len,
        num_kv_blocks=90,
        block_size=16,
        device="fake",
        core_pid=core_pid,
        worker_pids=[],
    )


def input_processor(
    tokenizer: Tokenizer, max_model_len: int = 100, seed: str | None = None
) -> InputProcessor:
    return InputProcessor(
        tokenizer, vocab_size=tokenizer.vocab_size, max_model_len=max_model_len, seed=seed
    )
