"""The sender of a load, which records the answers as their receiver sees them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from sidestep.frontend.api.async_llm import AsyncLLM
from sidestep.frontend.bench.load import PlannedRequest
from sidestep.frontend.bench.load_report import DRAFT_COUNTS, Report, Sample, speculation
from sidestep.ipc.common.errors import QueueFullError, RequestError, ValidationError
from sidestep.ipc.params.sampling_params import RequestOutputKind, SamplingParams
from sidestep.ipc.processes.process import cpu_seconds

IDLE_CAUSES = ("result", "schedule", "prepare")


class Target(Protocol):
    """The interface of a target that requests are sent to."""

    async def send(self, request: PlannedRequest, sample: Sample) -> None:
        """Run one request to its end, and note it in `sample`.

        Raises RequestError, ValidationError or QueueFullError for a request that cannot be served;
        any other exception ends the load.
        """

    async def figures(self) -> dict[str, float]:
        """Return what host and device have spent so far, as far as it is known.

        The names are device_busy_s, device_idle_s and its causes, DRAFT_COUNTS with speculation,
        and cpu_s_NAME for processes.
        """


class EngineTarget:
    """An engine that this process has started."""

    def __init__(
        self, llm: AsyncLLM, temperature: float, *, ignore_eos: bool = True, detokenize: bool = True
    ) -> None:
        self._llm = llm
        self._temperature = temperature
        self._ignore_eos = ignore_eos
        self._detokenize = detokenize

    async def send(self, request: PlannedRequest, sample: Sample) -> None:
        """Run one request to its end, and note it in `sample`."""
        params = SamplingParams(
            temperature=self._temperature,
            max_tokens=request.output_len,
            ignore_eos=self._ignore_eos,
            detokenize=self._detokenize,
            output_kind=RequestOutputKind.DELTA,
        )
        async for output in self._llm.generate(request.prompt, params):
            if output.outputs[0].token_ids:
                sample.arrivals.append(time.monotonic())
                sample.num_output_tokens += len(output.outputs[0].token_ids)
        sample.num_input_tokens = len(output.prompt_token_ids)

    async def figures(self) -> dict[str, float]:
        """Return the device's seconds, the counts of drafts, and the processes' CPU seconds."""
        stats = await self._llm.get_stats()
        wanted = {
            name: value
            for name, value in stats.items()
            if name.startswith("device_") or name in DRAFT_COUNTS
        }
        return wanted | {f"cpu_s_{name}": value for name, value in cpu_times(self._llm).items()}


async def send_all(
    target: Target,
    load: Sequence[PlannedRequest],
    begin: float,
    max_concurrency: int | None,
    on_end: Callable[[], object] = lambda: None,
) -> list[Sample]:
    """Send each request at its time, or as soon after as `max_concurrency` allows.

    Call `on_end` at the end of each request.
    """
    room = asyncio.Semaphore(max_concurrency if max_concurrency is not None else len(load))
    running: list[asyncio.Task[Sample]] = []
    for request in load:
        if (early := begin + request.at - time.monotonic()) > 0:
            await asyncio.sleep(early)
        await room.acquire()
        task = asyncio.create_task(_send(target, request, begin))
        task.add_done_callback(lambda _: room.release())
        task.add_done_callback(lambda _: on_end())
        running.append(task)
    return await asyncio.gather(*running)


async def _send(target: Target, request: PlannedRequest, begin: float) -> Sample:
    sample = Sample(planned=begin + request.at, sent=time.monotonic())
    try:
        await target.send(request, sample)
    except (RequestError, ValidationError, QueueFullError) as error:  # must not end the others
        sample.error = str(error)
    return sample


def cpu_times(llm: AsyncLLM) -> dict[str, float]:
    """Return the CPU seconds of each of the engine's processes so far, as far as known.

    Processes on other hosts are left out.
    """
    pids = {name: pid for name, pid in llm.pids.items() if name == "frontend" or not llm.hosts}
    times = {name: cpu_seconds(pid) for name, pid in pids.items()}
    return {name: seconds for name, seconds in times.items() if seconds is not None}


def usage(after: dict[str, float], before: dict[str, float]) -> Report:
    """Return drafts, and the usage of device and host, between two readings of a target's figures.

    Only figures that both readings have are compared.
    """
    spent = {name: after[name] - before[name] for name in after.keys() & before.keys()}
    report = speculation(after, before)
    if "device_busy_s" in spent:
        working = max(1e-9, spent["device_busy_s"] + spent["device_idle_s"])
        report |= {
            "device_busy_s": spent["device_busy_s"],
            "device_idle_share": spent["device_idle_s"] / working,
            **{
                f"device_idle_share_{cause}": spent[f"device_idle_{cause}_s"] / working
                for cause in IDLE_CAUSES
            },
        }
    return report | {
        name: spent[name] for name in after if name in spent and name.startswith("cpu_s_")
    }
