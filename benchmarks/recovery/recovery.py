"""Measure how long streams pause when a step of their worker breaks, and whether they miss a token.

    python benchmarks/recovery/recovery.py [--model llama-3.1-8b] [--device cuda] [--dtype auto]
        [--streams 8] [--tokens 400] [--faults trap memory kill]

The faults are a kernel that traps, an allocation that fails, and SIGKILL of the worker, each while
one stream runs alone and while several do. All streams are greedy, and weights are random, so a
start reads no files; `--model bundled` is the bundled model. No replica waits before its start, as
at its first death in ten minutes. The figures of a fault:

- the pause: the longest time between two tokens of the stream that waited longest, and its parts:
  until the process that started the engine knew of the death, and until the replica served again;
- lost: tokens that did not come, or came too often;
- as alone: tokens of a lone stream that are those of an undisturbed run;
- as continued: tokens of a lone stream that are those of an undisturbed engine which is given the
  prompt and the tokens that came before the pause. It computes what the replay computes, bit for
  bit, so all must be the same;
- valid: tokens that are the most probable ones after those before them, up to rounding, and the
  largest difference of log-probabilities to the most probable one.

The exit status is 1 if a token is lost or not valid, or a lone stream is not as continued.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.recovery.breaker import TARGET
from benchmarks.workloads import MODELS, write_model
from sidestep import DEFAULT_MODEL, AsyncLLM, EngineArgs, RequestOutputKind, SamplingParams
from sidestep.frontend.api.event_loop import new_event_loop
from sidestep.frontend.replicas import restart_budget

PROMPT_TOKENS = 64
TIE = 0.5
"""Most nats by which rounding may let a token be less probable than the best one."""


@dataclass
class Stream:
    """A stream's tokens, and when they came."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """When each output came."""
    counts: list[int] = field(default_factory=list)
    """Tokens after each output."""

    def pause(self, fault: float) -> tuple[float, int]:
        """Return the longest time between two outputs, and the number of tokens before it.

        fault: a moment; the pause ends after it.
        """
        gaps = [
            (after - before, count)
            for (before, after), count in zip(
                itertools.pairwise(self.times), self.counts, strict=False
            )
            if after > fault
        ]
        return max(gaps)


@dataclass
class Moments:
    """When the engine knew of a death, and when its replica served again."""

    fault: float
    known: float | None = None
    serves: float | None = None

    async def watch(self, llm: AsyncLLM) -> None:
        """Look at the replica until the task is cancelled."""
        while True:
            is_restarting = llm.replicas[0].restarting is not None
            if is_restarting and self.known is None:
                self.known = time.monotonic()
            if self.known is not None and not is_restarting and self.serves is None:
                self.serves = time.monotonic()
            await asyncio.sleep(0.002)

    def parts(self) -> str:
        """Return the seconds from the fault to both moments."""
        if self.known is None or self.serves is None:
            return f"{'-':>7}{'-':>8}"
        return f"{self.known - self.fault:7.2f}{self.serves - self.fault:8.2f}"


class Benchmark:
    """One engine and the runs on it."""

    def __init__(self, llm: AsyncLLM, args: argparse.Namespace, folder: str) -> None:
        """Keep an engine that runs. folder: for the files that allow a fault."""
        self._llm, self._args = llm, args
        self._file = os.path.join(folder, "break")
        self._vocab = llm.get_tokenizer().vocab_size
        if args.model != "bundled":
            self._vocab = MODELS[args.model]["vocab_size"]
        self.has_failed = False

    def _params(self, fault: str, num_tokens: int) -> SamplingParams:
        wish = {"fault": fault, "file": self._file}
        return SamplingParams(
            temperature=0,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"Breaker": wish},
        )

    def _prompts(self, count: int) -> list[list[int]]:
        rng = random.Random(count)
        return [
            [rng.randrange(10, min(self._vocab, 100000)) for _ in range(PROMPT_TOKENS)]
            for _ in range(count)
        ]

    async def _read(self, stream: Stream, fault: str, num_tokens: int) -> None:
        async for output in self._llm.generate(stream.prompt, self._params(fault, num_tokens)):
            stream.tokens += output.outputs[0].token_ids
            stream.times.append(time.monotonic())
            stream.counts.append(len(stream.tokens))

    async def undisturbed(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Return the tokens of a run without a fault."""
        stream = Stream(prompt)
        await self._read(stream, "trap", num_tokens)
        return stream.tokens

    async def as_continued(self, stream: Stream, told: int) -> int:
        """Return how many tokens are those of an engine that is given the first `told` of them."""
        head, wanted = stream.tokens[:told], self._args.tokens
        rest = await self.undisturbed([*stream.prompt, *head], wanted - told)
        return equal(stream.tokens, [*head, *rest])

    async def broken(self, fault: str, count: int) -> tuple[list[Stream], Moments]:
        """Run streams, break the worker in the middle, and wait for their end."""
        streams = [Stream(prompt) for prompt in self._prompts(count)]
        tasks = [
            asyncio.create_task(self._read(stream, fault, self._args.tokens)) for stream in streams
        ]
        while min(len(stream.tokens) for stream in streams) < self._args.tokens // 3:
            await asyncio.sleep(0.001)
        moments = Moments(time.monotonic())
        watching = asyncio.create_task(moments.watch(self._llm))
        if fault == "kill":
            os.kill(self._llm.pids["worker_0"], signal.SIGKILL)
        else:
            Path(self._file).touch()
        await asyncio.gather(*tasks)
        watching.cancel()
        if os.path.exists(self._file):
            raise SystemExit(f"the fault {fault!r} has not happened")
        return streams, moments

    async def validity(self, streams: Sequence[Stream]) -> tuple[int, float]:
        """Return how many tokens are the best, or tie with it, and the largest distance to it."""
        valid, worst = 0, 0.0
        for stream in streams:
            params = SamplingParams(max_tokens=1, prompt_logprobs=1, detokenize=False)
            async for output in self._llm.generate([*stream.prompt, *stream.tokens], params):
                if output.prompt_logprobs is None:
                    continue
                places = output.prompt_logprobs[len(stream.prompt) :]
                for token, place in zip(stream.tokens, places, strict=True):
                    assert place is not None
                    distance = max(one.logprob for one in place.values()) - place[token].logprob
                    valid += distance <= TIE
                    worst = max(worst, distance)
        return valid, worst

    async def row(self, fault: str, count: int) -> str:
        """Return the table's row of a fault."""
        streams, moments = await self.broken(fault, count)
        pause = max(stream.pause(moments.fault)[0] for stream in streams)
        wanted = self._args.tokens
        lost = sum(abs(wanted - len(stream.tokens)) for stream in streams)
        alone = continued = f"{'-':>10}"
        if count == 1:
            (stream,) = streams
            told = stream.pause(moments.fault)[1]
            expected = await self.undisturbed(stream.prompt, wanted)
            alone = f"{equal(stream.tokens, expected):>5}/{wanted}"
            # The last token before a soft reset may be told after it.
            same = max([await self.as_continued(stream, told + late) for late in (0, 1)])
            continued = f"{same:>5}/{wanted}"
            self.has_failed |= same < wanted or expected[:told] != stream.tokens[:told]
        valid, worst = await self.validity(streams)
        self.has_failed |= lost > 0 or valid < wanted * count
        return (
            f"{fault:8}{count:8}{pause:9.3f}{moments.parts()}{lost:6}{alone:>11}{continued:>14}"
            f"{valid:>8}/{wanted * count}{worst:9.3f}"
        )


def equal(found: Sequence[int], expected: Sequence[int]) -> int:
    """Return the number of first tokens that are the same."""
    pairs = enumerate(zip(found, expected, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(found), len(expected)))


def engine_args(args: argparse.Namespace, folder: str) -> EngineArgs:
    """Return the options of the engine."""
    options: dict[str, Any] = {
        "device": args.device,
        "dtype": args.dtype,
        "logits_processors": [TARGET],
        "max_model_len": 2048,
        "restart_limit": 100,
        "crash_dir": folder,
        # So that a replay computes all tokens, as an engine does which gets them as a prompt.
        "enable_prefix_caching": False,
    }
    if args.model != "bundled":
        options |= {
            "model": write_model(args.model, folder),
            "tokenizer": DEFAULT_MODEL,
            "load_format": "dummy",
        }
    return EngineArgs(**options)


async def run(args: argparse.Namespace) -> int:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        print(f"{args.model}, {args.dtype}, {args.tokens} tokens a stream")
        begin = time.monotonic()
        AsyncLLM.from_engine_args(engine_args(args, folder)).shutdown()
        print(f"first start {time.monotonic() - begin:.2f} s, and its end", flush=True)
        begin = time.monotonic()
        async with AsyncLLM.from_engine_args(engine_args(args, folder)) as llm:
            print(f"warm start {time.monotonic() - begin:.2f} s", flush=True)
            benchmark = Benchmark(llm, args, folder)
            print(
                f"{'fault':8}{'streams':>8}{'pause s':>9}{'known':>7}{'serves':>8}{'lost':>6}"
                f"{'as alone':>11}{'as continued':>14}{'valid':>12}{'worst':>9}"
            )
            for fault, count in itertools.product(args.faults, sorted({1, args.streams})):
                print(await benchmark.row(fault, count), flush=True)
        return 1 if benchmark.has_failed else 0


def main() -> int:
    """Run the benchmark without pauses between starts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-3.1-8b", choices=["bundled", *MODELS])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--faults", nargs="+", default=["memory", "trap", "kill"])
    args = parser.parse_args()
    restart_budget.BACKOFF_S = (0.0, 0.0, 0.0)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(run(args))


if __name__ == "__main__":
    raise SystemExit(main())
