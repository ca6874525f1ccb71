"""`sidestep generate`, which completes prompts and prints tokens as they come.

Standard output holds the prompts with their completions and nothing else. Headings and figures go
to standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Sequence

import msgspec

from sidestep.frontend.api.async_llm import AsyncLLM
from sidestep.frontend.api.event_loop import new_event_loop
from sidestep.frontend.cli.printer import Printer
from sidestep.frontend.options.engine_args import EngineArgs
from sidestep.frontend.options.flags import check_url_flags, sampling_params
from sidestep.frontend.output.outputs import RequestOutput
from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.common.logs import tell
from sidestep.ipc.params.sampling_params import RequestOutputKind, SamplingParams


def run_generate(parsed: argparse.Namespace) -> int:
    """Run `sidestep generate` and return its exit status."""
    prompts = parsed.prompts or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not prompts:
        raise ValidationError("prompts", "none given, neither as arguments nor on standard input")
    check_url_flags(parsed)
    if parsed.url is not None:
        from sidestep.frontend.cli.remote_commands import run_remote_generate

        return run_remote_generate(parsed, prompts)
    sampling_params(parsed, max_tokens=64)  # raises before the engine starts if they are wrong
    arguments = EngineArgs.from_cli_args(parsed)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        llm = start_engine(arguments)
        params = sampling_params(parsed, **{"max_tokens": 64, **llm.sampling_defaults})
        runner.run(generate(llm, prompts, params))
    return 0


def start_engine(arguments: EngineArgs, meanwhile: Callable[[], object] | None = None) -> AsyncLLM:
    """Start the engine, with lines on standard error about its progress.

    meanwhile: as in AsyncLLM.
    """
    start = time.perf_counter()
    tell(f"starting the engine with {arguments.model} ...")
    llm = AsyncLLM(arguments.create_engine_config(), meanwhile=meanwhile)
    tell(f"ready in {time.perf_counter() - start:.1f} s on {llm.device}")
    return llm


async def generate(llm: AsyncLLM, prompts: Sequence[str], params: SamplingParams) -> None:
    """Stream all prompts at once, and print them in order, then the summary."""
    params = msgspec.structs.replace(params, output_kind=RequestOutputKind.DELTA)
    async with llm:
        printer = Printer(prompts)

        async def stream(index: int, prompt: str) -> RequestOutput:
            async for output in llm.generate(prompt, params):
                printer.add(index, output.outputs[0].text, output.finished)
            return output

        start = time.perf_counter()
        last = await asyncio.gather(*(stream(i, p) for i, p in enumerate(prompts)))
        tell(summary(last, time.perf_counter() - start))


def summary(outputs: Sequence[RequestOutput], seconds: float) -> str:
    """Return one line with the tokens, the TTFT and the tokens a second."""
    tokens = sum(o.metrics.num_generation_tokens for o in outputs)
    latencies = [o.metrics.first_token_latency or 0.0 for o in outputs]
    mean_ms = sum(latencies) / len(latencies) * 1e3
    return (
        f"{len(outputs)} requests, {tokens} tokens in {seconds:.2f} s: TTFT {mean_ms:.0f} ms, "
        f"{tokens / seconds:.0f} tokens/s"
    )
