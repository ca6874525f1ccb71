"""Measure the effect of each mechanism that keeps the device busy, by switching it off.

    python benchmarks/overlap.py [--device fake --step-ms 10] [--streams 64] [--tokens 200]
        [--json FILE]
    python benchmarks/overlap.py --placer join|ray [--step-ms 5]
    python benchmarks/overlap.py --device cuda --model DIR [--load-format dummy] [--streams 64]
        [--tokens 200]

The load is the same for all. The fake device takes exactly --step-ms for a step, so busy / (busy +
idle while there was work) depends on the engine alone. These are switched off in turn: overlapped
scheduling; on a GPU, graphs; and merged outputs, so that each reader takes every token in an output
of its own, however late that is. The script prints a table. With --check it exits with 1 when
overlap keeps the device less than 97% busy, when it makes no difference, or when any switch changes
a token.

With --placer nothing is switched off. The same engine runs by the placer `local` and by this one,
whose host is this machine too, in turn, --rounds times. The difference of the best rounds is that
of the channels between hosts. --check then exits with 1 if it is more than 1%.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.placers import PLACERS, placed
from sidestep import (
    DEFAULT_MODEL,
    AsyncLLM,
    EngineArgs,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from sidestep.frontend.bench.load_report import percentile
from sidestep.frontend.output.request_state import RequestState


@dataclass(frozen=True)
class Variant:
    """One way to run the load."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    merged: bool = True

    placer: str = "local"

    def on(self, placer: str, number: int) -> Variant:
        """Return this variant by a placer, in a round of several."""
        return replace(self, name=f"{placer}, round {number}", placer=placer)


ALL = Variant("all on")
NO_OVERLAP = Variant("no overlap", {"async_scheduling": False})
NO_GRAPHS = Variant("no graphs", {"enforce_eager": True})
NOT_MERGED = Variant("outputs not merged", merged=False)


@dataclass(frozen=True)
class Result:
    """One row of the table."""

    variant: str
    device_busy: float
    """Share of the time with work during which the device ran."""
    tokens_per_s: float
    step_ms: float
    """Wall-clock time of a step, the device's time included, in milliseconds."""
    itl_ms_p99: float


@contextmanager
def one_by_one() -> Iterator[None]:
    """Give readers each token in an output of its own."""
    take = RequestState.take

    def take_one(state: RequestState) -> RequestOutput:
        tokens, finish = state._token_ids, state._finish_reason
        later = tokens[state._taken_tokens + 1 :]
        if later:
            del tokens[state._taken_tokens + 1 :]
            state._finish_reason = None
        output = take(state)
        tokens += later
        state._finish_reason = finish
        return output

    RequestState.take = take_one  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        RequestState.take = take  # type: ignore[method-assign]


async def run_load(
    args: argparse.Namespace, variant: Variant, placement: dict[str, Any]
) -> tuple[Result, list[list[int]]]:
    """Run all streams at once, each of the same length. placement: options of the placer."""
    fake = {"fake_step_ms": args.step_ms} if args.device == "fake" else {}
    engine_args = EngineArgs(
        **{
            "model": args.model,
            "load_format": args.load_format,
            "tokenizer": args.tokenizer,
            "device": args.device,
            "max_num_seqs": args.streams,
            "max_num_batched_tokens": max(2048, args.streams),
            **fake,
            **variant.options,
            **placement,
        }
    )
    params = SamplingParams(
        max_tokens=args.tokens,
        ignore_eos=True,
        seed=1,
        temperature=1.0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    gaps: list[float] = []
    async with AsyncLLM.from_engine_args(engine_args) as llm:

        async def stream(index: int) -> list[int]:
            tokens, times = [], []
            async for out in llm.generate([10 + index, 11, 12], params):
                tokens += out.outputs[0].token_ids
                times.append(time.perf_counter())
            gaps.extend(b - a for a, b in pairwise(times))
            return tokens

        await asyncio.gather(*(stream(i) for i in range(4)))  # first use of everything
        gaps.clear()
        before, start = await llm.get_stats(), time.perf_counter()
        tokens = await asyncio.gather(*(stream(i) for i in range(args.streams)))
        wall, after = time.perf_counter() - start, await llm.get_stats()
    busy = after["device_busy_s"] - before["device_busy_s"]
    idle = after["device_idle_s"] - before["device_idle_s"]
    return Result(
        variant=variant.name,
        device_busy=busy / (busy + idle),
        tokens_per_s=sum(map(len, tokens)) / wall,
        step_ms=wall / args.tokens * 1e3,
        itl_ms_p99=percentile(gaps, 99) * 1e3,
    ), tokens


def run(args: argparse.Namespace, variant: Variant) -> tuple[Result, list[list[int]]]:
    """Run one variant on an engine of its own."""
    with placed(variant.placer) as placement, nullcontext() if variant.merged else one_by_one():
        return asyncio.run(run_load(args, variant, placement))


def main() -> int:
    """Run all variants and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="fake", choices=("fake", "cpu", "cuda"))
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--tokenizer")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--placer", default="local", choices=PLACERS)
    parser.add_argument("--rounds", type=int, default=3, help="with --placer")
    parser.add_argument("--json", help="also write the results to this file")
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 unless overlap does its work"
    )
    args = parser.parse_args()
    variants = [ALL, NO_OVERLAP, *([NO_GRAPHS] if args.device == "cuda" else []), NOT_MERGED]
    if args.placer != "local":
        rounds = range(1, args.rounds + 1)
        variants = [ALL.on(placer, n) for n in rounds for placer in ("local", args.placer)]
    runs = {variant.name: run(args, variant) for variant in variants}
    device = (
        f"fake device with steps of {args.step_ms} ms" if args.device == "fake" else args.device
    )
    print(f"{args.streams} streams x {args.tokens} tokens, {device}")
    print(f"{'':>20} {'device busy':>12} {'tokens/s':>10} {'step ms':>9} {'p99 ITL ms':>11}")
    for result, _ in runs.values():
        print(
            f"{result.variant:>20} {result.device_busy:>12.1%} {result.tokens_per_s:>10.0f} "
            f"{result.step_ms:>9.2f} {result.itl_ms_p99:>11.2f}"
        )
    (first, expected), *_ = runs.values()
    same = all(tokens == expected for _, tokens in runs.values())
    print(f"tokens equal in all: {same}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump([asdict(result) for result, _ in runs.values()], file, indent=1)
    if args.placer != "local":
        busy = {placer: best_busy(runs, placer) for placer in ("local", args.placer)}
        print(", ".join(f"{placer}: {share:.2%} busy" for placer, share in busy.items()))
        good = busy[args.placer] >= busy["local"] - 0.01 and same
    else:
        off = runs[NO_OVERLAP.name][0].device_busy
        good = first.device_busy >= 0.97 and off < first.device_busy - 0.01 and same
    return 0 if good or not args.check else 1


def best_busy(runs: dict[str, tuple[Result, list[list[int]]]], placer: str) -> float:
    """Return the largest share of a placer's rounds: other work on the machine lowers it."""
    return max(result.device_busy for name, (result, _) in runs.items() if name.startswith(placer))


if __name__ == "__main__":
    sys.exit(main())
