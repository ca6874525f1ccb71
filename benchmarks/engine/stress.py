"""Load one frontend for a long time and check its speed, its memory and its answers.

    python benchmarks/engine/stress.py [--seconds 600] [--streams 1024] [--step-ms 20]
        [--output-len 400] [--json FILE]

The frontend must keep up, its memory must stay flat, and no request may be lost or answered twice.
The fake device gives every stream a token each --step-ms; as soon as a stream ends, the next
begins. The script prints a line every tenth of the time, then a table. The delivery delay is the
time from the end of a step on the device until the frontend has given its tokens to the requests.
It can only stay small if nothing falls behind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import dataclass, field

import psutil

from sidestep import AsyncLLM, EngineArgs, RequestOutputKind, SamplingParams
from sidestep.executor.runner.fake import expected_tokens
from sidestep.frontend.api.event_loop import new_event_loop
from sidestep.frontend.bench.load_report import percentile

CHECKED = 50
"""One request in this many is compared with the expected tokens, token by token."""


@dataclass
class Count:
    """Counts and delays that the streams saw."""

    requests: int = 0
    tokens: int = 0
    wrong: int = 0
    delays_ms: list[float] = field(default_factory=list)


async def stream(
    llm: AsyncLLM, index: int, args: argparse.Namespace, until: float, count: Count
) -> None:
    """Send one request after the other, each with its own prompt."""
    vocab, number = llm.get_tokenizer().vocab_size, 0
    while time.monotonic() < until:
        prompt = [1 + index % 1000, 1 + number % 1000, 1 + (index + number) % 7]
        params = SamplingParams(
            max_tokens=args.output_len,
            ignore_eos=True,
            seed=index,
            output_kind=RequestOutputKind.DELTA,
        )
        tokens: list[int] = []
        async for output in llm.generate(prompt, params):
            tokens += output.outputs[0].token_ids
        count.requests += 1
        count.tokens += len(tokens)
        right = len(tokens) == args.output_len
        if right and count.requests % CHECKED == 0:
            right = tokens == expected_tokens(prompt, args.output_len, index, vocab)
        count.wrong += not right
        number += 1


async def watch(
    llm: AsyncLLM, args: argparse.Namespace, begin: float, count: Count
) -> list[dict[str, float]]:
    """Print memory and progress ten times, and record the delays of the steps in between."""
    readings: list[dict[str, float]] = []
    seen = told = 0
    ends: dict[int, int] = {}
    """End of a delivery's step in ns, by the delivery's number; each step with tokens makes one."""
    for part in range(1, 11):
        await asyncio.sleep(max(0.0, begin + args.seconds * part / 10 - time.monotonic()))
        for step in await llm.get_step_records(since=seen):
            seen = step.step_id + 1
            if step.num_sampled:
                ends[told] = step.end_ns
                told += 1
        count.delays_ms += [
            (d.end_ns - ends.pop(d.number)) / 1e6 for d in llm.get_deliveries() if d.number in ends
        ]
        reading = {"seconds": time.monotonic() - begin, "tokens": float(count.tokens)}
        reading |= {
            f"{name}_mb": psutil.Process(pid).memory_info().rss / 1e6
            for name, pid in llm.pids.items()
        }
        readings.append(reading)
        print("  ".join(f"{name} {value:.0f}" for name, value in reading.items()), flush=True)
    return readings


async def run(args: argparse.Namespace) -> dict[str, float]:
    """Run the whole load and return its figures."""
    blocks = args.streams * (args.output_len // 16 + 2)
    engine_args = EngineArgs(
        device="fake",
        fake_step_ms=args.step_ms,
        max_num_seqs=args.streams,
        num_kv_blocks=blocks,
        max_num_batched_tokens=8 * args.streams,
    )
    count = Count()
    async with AsyncLLM.from_engine_args(engine_args) as llm:
        begin = time.monotonic()
        watching = asyncio.create_task(watch(llm, args, begin, count))
        await asyncio.gather(
            *(stream(llm, i, args, begin + args.seconds, count) for i in range(args.streams))
        )
        seconds = time.monotonic() - begin
        readings, stats = await watching, await llm.get_stats()
        left = [r for r in await llm.get_request_records() if r.status != "finished"]
    busy, idle = stats["device_busy_s"], stats["device_idle_s"]
    growth = {
        f"{name}_growth": value - readings[1][name]
        for name, value in readings[-1].items()
        if name.endswith("_mb")
    }
    return {
        "streams": args.streams,
        "seconds": seconds,
        "requests": count.requests,
        "wrong": count.wrong,
        "left": len(left),
        "tokens_per_s": count.tokens / seconds,
        "device_idle_share": idle / (busy + idle),
        **{f"delivery_delay_ms_p{q}": percentile(count.delays_ms, q) for q in (50, 99)},
        **growth,
    }


def main() -> int:
    """Print a table; the exit status is 1 if a request was lost or wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--streams", type=int, default=1024)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--output-len", type=int, default=400)
    parser.add_argument("--json", help="also write the result to this file")
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        result = runner.run(run(args))
    for name, value in result.items():
        print(f"{name:<24} {value:.3f}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(result, file, indent=1)
    return 1 if result["wrong"] or result["left"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
