"""`sidestep bench`, which measures the engine from an application with random prompts."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence

from sidestep.frontend.api.async_llm import AsyncLLM
from sidestep.frontend.api.event_loop import new_event_loop
from sidestep.frontend.api.progress import progress_bar
from sidestep.frontend.bench.load_report import Report, percentile, speculation
from sidestep.frontend.cli.generate import start_engine
from sidestep.frontend.options.engine_args import EngineArgs
from sidestep.frontend.output.outputs import RequestOutput
from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.params.sampling_params import RequestOutputKind, SamplingParams


def run_bench(parsed: argparse.Namespace) -> int:
    """Run `sidestep bench` and return its exit status."""
    llm = start_for_load(parsed)
    measure = throughput if parsed.bench == "throughput" else latency
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        show(runner.run(measure(llm, parsed)), parsed.json)
    return 0


def start_for_load(parsed: argparse.Namespace) -> AsyncLLM:
    """Start the engine, and return it if it can take the load that was asked for.

    Raises ValidationError, which names the flag.
    """
    for name in ("input_len", "output_len", "num_prompts", "batch_size", "num_iters"):
        if getattr(parsed, name, 1) < 1:
            raise ValidationError(name, "must be at least 1")
    llm = start_engine(EngineArgs.from_cli_args(parsed))
    if parsed.input_len + parsed.output_len > llm.max_model_len:
        raise ValidationError(
            "output_len",
            f"{parsed.output_len} and input_len ({parsed.input_len}) together are more "
            f"than max_model_len ({llm.max_model_len})",
        )
    return llm


def random_prompts(llm: AsyncLLM, count: int, length: int, seed: int) -> list[list[int]]:
    """Return random token ids, drawn for each prompt.

    So the prefix cache does not help.
    """
    rng = random.Random(seed)
    vocab_size = llm.get_tokenizer().vocab_size
    return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


async def run_batch(
    llm: AsyncLLM, prompts: Sequence[list[int]], output_len: int
) -> tuple[list[RequestOutput], float]:
    """Run all requests at once, and return their last outputs and the seconds that they took.

    The time ends with the last token of the last request.
    """
    params = SamplingParams(
        temperature=0, max_tokens=output_len, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )

    with progress_bar(len(prompts), "request") as bar:

        async def one(prompt: list[int]) -> RequestOutput:
            async for output in llm.generate(prompt, params):
                pass
            bar.update()
            return output

        start = time.perf_counter()
        outputs = await asyncio.gather(*map(one, prompts))
        return outputs, time.perf_counter() - start


async def throughput(llm: AsyncLLM, parsed: argparse.Namespace) -> Report:
    """Return the tokens a second of many requests at once."""
    async with llm:
        await run_batch(llm, random_prompts(llm, 2, parsed.input_len, seed=1), 8)
        prompts = random_prompts(llm, parsed.num_prompts, parsed.input_len, seed=2)
        before = await llm.get_stats()
        outputs, seconds = await run_batch(llm, prompts, parsed.output_len)
        tokens_out = sum(o.metrics.num_generation_tokens for o in outputs)
        tokens_in = sum(len(o.prompt_token_ids) for o in outputs)
        return {
            "device": llm.device,
            "requests": len(outputs),
            "seconds": seconds,
            "tokens_in": tokens_in,
            "tokens_out": tokens_out,
            "requests_per_s": len(outputs) / seconds,
            "output_tokens_per_s": tokens_out / seconds,
            "total_tokens_per_s": (tokens_in + tokens_out) / seconds,
            **percentiles("ttft_ms", [(o.metrics.first_token_latency or 0) * 1e3 for o in outputs]),
            **speculation(await llm.get_stats(), before),
        }


async def latency(llm: AsyncLLM, parsed: argparse.Namespace) -> Report:
    """Return the seconds of a batch, measured several times."""
    async with llm:
        await run_batch(llm, random_prompts(llm, parsed.batch_size, parsed.input_len, seed=1), 8)
        before, seconds, ttft = await llm.get_stats(), [], []
        for iteration in range(parsed.num_iters):
            prompts = random_prompts(llm, parsed.batch_size, parsed.input_len, seed=2 + iteration)
            outputs, elapsed = await run_batch(llm, prompts, parsed.output_len)
            seconds.append(elapsed)
            ttft += [(o.metrics.first_token_latency or 0) * 1e3 for o in outputs]
        mean = sum(seconds) / len(seconds)
        return {
            "device": llm.device,
            "batch_size": parsed.batch_size,
            "iterations": len(seconds),
            "mean_s": mean,
            **percentiles("batch_s", seconds),
            "ms_per_token": mean / parsed.output_len * 1e3,
            **percentiles("ttft_ms", ttft),
            **speculation(await llm.get_stats(), before),
        }


def percentiles(name: str, values: Sequence[float]) -> Report:
    """Return the median and the 99th percentile (nearest rank)."""
    return {f"{name}_p{q}": percentile(values, q) for q in (50, 99)}


def show(result: Report, as_json: bool) -> None:
    """Print a result on standard output, as a table or as JSON."""
    if as_json:
        print(json.dumps(result, indent=1))
    else:
        print_table(result)


def print_table(result: Report) -> None:
    """Print a line for each figure."""
    width = max(map(len, result))
    for name, value in result.items():
        print(
            f"{name:<{width}}  {value:.3f}"
            if isinstance(value, float)
            else f"{name:<{width}}  {value}"
        )
