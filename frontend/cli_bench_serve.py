"""`sidestep bench serve`: a stream of requests, as users send them, and what they and the machine saw of it."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterable
from itertools import islice

from sidestep.frontend.async_llm import AsyncLLM
from sidestep.frontend.cli_args import engine_args
from sidestep.frontend.cli_bench import random_prompts, run_batch, show
from sidestep.frontend.cli_generate import start_engine
from sidestep.frontend.event_loop import new_event_loop
from sidestep.frontend.load import Lengths, PlannedRequest, arrivals, random_requests, read_requests
from sidestep.frontend.load_report import GOALS, Report, Sample, make_report
from sidestep.ipc.errors import RequestError, ValidationError
from sidestep.ipc.process import cpu_seconds
from sidestep.ipc.sampling_params import RequestOutputKind, SamplingParams


def run_bench_serve(parsed: argparse.Namespace) -> int:
    """The command."""
    check(parsed)
    goals = parse_goals(parsed.goodput)
    llm = start_engine(engine_args(parsed))
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        show(runner.run(serve(llm, parsed, goals)), parsed.json)
    return 0


def check(parsed: argparse.Namespace) -> None:
    """Raises ValidationError for what cannot be run, before an engine is started."""
    if parsed.num_prompts < 1:
        raise ValidationError("num_prompts", "must be at least 1")
    if not parsed.request_rate > 0:
        raise ValidationError("request_rate", f"must be above 0, not {parsed.request_rate}")
    if parsed.max_concurrency is not None and parsed.max_concurrency < 1:
        raise ValidationError("max_concurrency", "must be at least 1")


def parse_goals(words: Iterable[str]) -> dict[str, float]:
    """Milliseconds by name, of words like ttft:200."""
    goals = {}
    for word in words:
        name, _, limit = word.partition(":")
        try:
            goals[name] = float(limit)
        except ValueError:
            raise ValidationError("goodput", f"{word!r} is not NAME:MILLISECONDS") from None
        if name not in GOALS:
            raise ValidationError("goodput", f"unknown name {name!r}; there are {', '.join(GOALS)}")
    return goals


def plan(parsed: argparse.Namespace, vocab_size: int, max_model_len: int) -> list[PlannedRequest]:
    """All requests of the load."""
    requests: list[tuple[str | list[int], int]] = []
    if parsed.dataset is not None:
        requests += read_requests(parsed.dataset, parsed.num_prompts)
    else:
        inputs, outputs = (Lengths.parse(getattr(parsed, name), name) for name in ("input_len", "output_len"))
        if inputs.high + outputs.high > max_model_len:
            raise ValidationError("output_len", f"{outputs.high} and input_len ({inputs.high}) together are more than "
                                  f"max_model_len ({max_model_len})")
        requests += random_requests(parsed.num_prompts, inputs, outputs, vocab_size, parsed.load_seed)
    times = islice(arrivals(parsed.request_rate, parsed.arrival == "poisson", parsed.load_seed), len(requests))
    return [PlannedRequest(prompt, length, at) for (prompt, length), at in zip(requests, times, strict=True)]


async def serve(llm: AsyncLLM, parsed: argparse.Namespace, goals: dict[str, float]) -> Report:
    """Runs the load on an engine in this process."""
    async with llm:
        load = plan(parsed, llm.get_tokenizer().vocab_size, llm.max_model_len)
        await run_batch(llm, random_prompts(llm, 2, 16, seed=1), 8)
        stats, cpu = await llm.get_stats(), cpu_times(llm)
        begin = time.monotonic()
        samples = await send_all(llm, load, begin, parsed.max_concurrency, parsed.temperature)
        report = {"device": llm.device, **make_report(samples, begin, goals)}
        return report | usage(await llm.get_stats(), stats) | {
            f"cpu_s_{name}": seconds - cpu[name] for name, seconds in cpu_times(llm).items()}


async def send_all(llm: AsyncLLM, load: list[PlannedRequest], begin: float, max_concurrency: int | None,
                   temperature: float, *, detokenize: bool = True) -> list[Sample]:
    """Sends each request at its time, or as soon after as there is room."""
    room = asyncio.Semaphore(max_concurrency if max_concurrency is not None else len(load))
    running: list[asyncio.Task[Sample]] = []
    for request in load:
        if (early := begin + request.at - time.monotonic()) > 0:
            await asyncio.sleep(early)
        await room.acquire()
        task = asyncio.create_task(send(llm, request, begin, temperature, detokenize))
        task.add_done_callback(lambda _: room.release())
        running.append(task)
    return await asyncio.gather(*running)


async def send(llm: AsyncLLM, request: PlannedRequest, begin: float, temperature: float, detokenize: bool) -> Sample:
    """One request, to its end."""
    params = SamplingParams(temperature=temperature, max_tokens=request.output_len, ignore_eos=True,
                            output_kind=RequestOutputKind.DELTA, detokenize=detokenize)
    sample = Sample(planned=begin + request.at, sent=time.monotonic())
    try:
        async for output in llm.generate(request.prompt, params):
            if output.outputs[0].token_ids:
                sample.arrivals.append(time.monotonic())
                sample.num_output_tokens += len(output.outputs[0].token_ids)
        sample.num_input_tokens = len(output.prompt_token_ids)
    except (RequestError, ValidationError) as error:  # one that cannot be served must not end the others
        sample.error = str(error)
    return sample


def cpu_times(llm: AsyncLLM) -> dict[str, float]:
    """CPU seconds of each of the engine's processes so far, where the system tells."""
    times = {name: cpu_seconds(pid) for name, pid in llm.pids.items()}
    return {name: seconds for name, seconds in times.items() if seconds is not None}


def usage(after: dict[str, float], before: dict[str, float]) -> Report:
    """What the device did between two readings of the engine's figures."""
    spent = {name: after[name] - before[name] for name in after if name.startswith("device_")}
    working = max(1e-9, spent["device_busy_s"] + spent["device_idle_s"])
    return {"device_busy_s": spent["device_busy_s"], "device_idle_share": spent["device_idle_s"] / working,
            **{f"device_idle_share_{cause}": spent[f"device_idle_{cause}_s"] / working
               for cause in ("result", "schedule", "prepare")}}
