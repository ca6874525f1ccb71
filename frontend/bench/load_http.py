"""A server of the OpenAI API as the target of a load: a Sidestep server or any other."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from sidestep.frontend.bench.http_stream import BusyError, HttpServer
from sidestep.frontend.bench.load import PlannedRequest
from sidestep.frontend.bench.load_report import DRAFT_COUNTS, Sample
from sidestep.frontend.bench.load_send import IDLE_CAUSES
from sidestep.ipc.common.errors import RequestError


class _CompletionChoice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Event(msgspec.Struct):
    """The fields of an event that are needed here.

    A server whose stream fails says so in an event.
    """

    choices: list[_CompletionChoice] = []
    usage: _Usage | None = None
    error: Any = None
    object: str | None = None


class TargetModel(msgspec.Struct):
    """A model that a server has."""

    id: str
    max_model_len: int | None = None


class _TargetModels(msgspec.Struct):
    data: list[TargetModel]


_event_decoder = msgspec.json.Decoder(_Event)


class HttpTarget:
    """A target that takes streamed completions over HTTP.

    Each completion has a connection of its own.
    """

    def __init__(
        self,
        server: HttpServer,
        model: str | None,
        temperature: float,
        *,
        ignore_eos: bool = True,
        max_retries: int = 0,
    ) -> None:
        """Prepare the fields of the requests.

        ignore_eos: whether to send that field, which the OpenAI API itself does not have.
        max_retries: most times that a request is sent again.
        """
        self._server = server
        self._max_retries = max_retries
        self._fields: dict[str, object] = {
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if model is not None:
            self._fields["model"] = model
        if ignore_eos:
            self._fields["ignore_eos"] = True

    async def send(self, request: PlannedRequest, sample: Sample) -> None:
        """Send one request and note its answer in `sample`; raises RequestError.

        A server that has no room, and says when it will have, is asked again then. Its answer has
        not begun, so nothing comes twice.
        """
        stream = _Stream(sample)
        body = msgspec.json.encode(
            {"prompt": request.prompt, "max_tokens": request.output_len, **self._fields}
        )
        while True:
            try:
                await self._server.request("POST", "/v1/completions", body, stream.receive)
                break
            except BusyError as busy:
                if sample.num_retries == self._max_retries:
                    raise
                sample.num_retries += 1
                # Requests that were refused together do not come back together.
                await asyncio.sleep(busy.retry_after_s * random.uniform(1, 1.5))
        if not stream.ended:
            raise RequestError("the answer broke off: the stream ended without [DONE]")
        if stream.usage is None:
            raise RequestError("the server sent no usage, so the tokens cannot be counted")
        sample.num_input_tokens = stream.usage.prompt_tokens
        sample.num_output_tokens = stream.usage.completion_tokens
        if not sample.num_output_tokens or not sample.arrivals:
            raise RequestError("the server sent no token")

    async def figures(self) -> dict[str, float]:
        """Return this process's CPU time, and the server's and its device's.

        The latter are there if the server is a Sidestep server and reports them.
        """
        return {**await self._server_figures(), "cpu_s_client": time.process_time()}

    async def _server_figures(self) -> dict[str, float]:
        try:
            text = await self._server.get("/metrics")
            ours = b"\n".join(line for line in text.splitlines() if b"sidestep:" in line).decode()
            found: dict[tuple[str, str | None], float] = {}
            for family in text_string_to_metric_families(ours + "\n"):
                for sample in family.samples:  # one of each replica
                    key = sample.name.removeprefix("sidestep:"), sample.labels.get("cause")
                    found[key] = found.get(key, 0.0) + sample.value
            idle = {
                f"device_idle_{cause}_s": found["device_idle_seconds_total", cause]
                for cause in IDLE_CAUSES
            }
            return {
                "device_busy_s": found["device_busy_seconds_total", None],
                "device_idle_s": sum(idle.values()),
                **idle,
                "cpu_s_frontend": found["frontend_cpu_seconds_total", None],
                **{
                    name: found[f"{name}_total", None]
                    for name in DRAFT_COUNTS
                    if (f"{name}_total", None) in found
                },
            }
        except (RequestError, ValueError, KeyError):
            return {}


async def models(server: HttpServer) -> list[TargetModel]:
    """Return the models of a server; raises RequestError."""
    try:
        return msgspec.json.decode(await server.get("/v1/models"), type=_TargetModels).data
    except msgspec.DecodeError as error:
        raise RequestError(f"/v1/models gave something else: {error}") from None


class _Stream:
    """The events of one answer."""

    def __init__(self, sample: Sample) -> None:
        self.usage: _Usage | None = None
        self.ended = False
        self._arrivals = sample.arrivals
        self._rest = b""

    def receive(self, part: bytes) -> None:
        """Take a part of the answer, whose events have come now.

        Raises RequestError.
        """
        now = time.monotonic()
        *lines, self._rest = (self._rest + part).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            if (data := line[5:].strip()) == b"[DONE]":
                self.ended = True
                continue
            event = _read(data)
            self.usage = event.usage or self.usage
            for choice in event.choices:
                # A request whose tokens have no text has received them by its end.
                if choice.text or (choice.finish_reason is not None and not self._arrivals):
                    self._arrivals.append(now)


def _read(data: bytes) -> _Event:
    """Return an event; raises RequestError for one that is not a completion's."""
    try:
        event = _event_decoder.decode(data)
    except msgspec.DecodeError as error:
        raise RequestError(f"an event is not one of a completion: {error}") from None
    if event.error is not None or event.object == "error":
        raise RequestError(f"the server ended the stream: {data.decode(errors='replace')[:200]}")
    return event
