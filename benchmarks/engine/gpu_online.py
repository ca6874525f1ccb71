"""Measure requests that come one by one, served by one AsyncLLM on a GPU.

Each figure is printed beside that of vLLM 0.26 on an H200.

    python benchmarks/engine/gpu_online.py
        [--loads qwen3-0.6b:60 qwen3-0.6b:120 llama-3.1-8b:50] [--seconds 12] [--json FILE]

The weights are random, in bf16. There are Poisson arrivals of 64 to 1,024 tokens of input and 32 to
256 of output, without detokenisation, after 64 requests to warm up. TTFT counts from the call, and
ITL is the gap between two outputs of a request. "Behind" is how much longer than the arrivals it
took to serve them, and "tail" the part of it that the longest request alone can cause. The GPU's
idle share while there was work is the engine's own gauge. Beside it stands the share of time in
which the driver (NVML) saw no kernel running.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.workloads import MODELS, online, write_model
from sidestep import DEFAULT_MODEL, AsyncLLM, EngineArgs
from sidestep.frontend.api.event_loop import new_event_loop
from sidestep.frontend.bench.load import PlannedRequest
from sidestep.frontend.bench.load_report import Report, make_report
from sidestep.frontend.bench.load_send import EngineTarget, cpu_times, send_all, usage

Load = tuple[str, float]
PEER = {
    ("qwen3-0.6b", 60): "vLLM: TTFT 37/92, ITL 3.0/30",
    ("qwen3-0.6b", 120): "vLLM: TTFT p99 6830, 10200 tok/s",
    ("llama-3.1-8b", 50): "vLLM: TTFT p99 287, ITL p99 43",
}


@contextmanager
def watched_by_driver() -> Iterator[list[float]]:
    """Yield a list that, at the end, has the share of time with a kernel, by the driver.

    It has one share for each sixth of a second or so.
    """
    seen: list[float] = []
    query = [
        "nvidia-smi",
        "--query-gpu=utilization.gpu",
        "--format=csv,noheader,nounits",
        "-lms",
        "200",
    ]
    with subprocess.Popen(query, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield seen
        finally:
            process.terminate()
            assert process.stdout is not None
            seen += [float(line) / 100 for line in process.stdout.read().split()]


def planned(rate: float, count: int, vocab_size: int) -> list[PlannedRequest]:
    """Return `count` requests at a rate a second."""
    return [
        PlannedRequest(prompt, length, at) for at, prompt, length in online(rate, count, vocab_size)
    ]


async def measure(llm: AsyncLLM, load: list[PlannedRequest]) -> Report:
    """Return the figures of one load."""
    await llm.reset_prefix_cache()
    stats, cpu = await llm.get_stats(), cpu_times(llm)
    with watched_by_driver() as seen:
        begin = time.monotonic()
        samples = await send_all(EngineTarget(llm, 0.6, detokenize=False), load, begin, None)
    report = make_report(samples, begin, {}) | usage(await llm.get_stats(), stats)
    tokens = sum(s.num_output_tokens for s in samples)
    longest = max(samples, key=lambda s: s.arrivals[-1])
    frontend = cpu_times(llm)["frontend"] - cpu["frontend"]
    return report | {
        "behind": report_number(report, "seconds") / load[-1].at - 1,
        "tail": longest.e2e / load[-1].at,
        "frontend_us_per_token": frontend / tokens * 1e6,
        "driver_idle_share": 1 - sum(seen[2:-2]) / len(seen[2:-2]),
        "gauge_idle_share": 1
        - report_number(report, "device_busy_s") / report_number(report, "seconds"),
    }


def report_number(report: Report, name: str) -> float:
    """Return a figure that is a float."""
    value = report[name]
    assert isinstance(value, float)
    return value


async def run_model(model: str, rates: list[float], seconds: float) -> dict[str, Report]:
    """Return the reports of a model's loads, all on one engine."""
    path, vocab_size = write_model(model, tempfile.mkdtemp()), MODELS[model]["vocab_size"]
    reports = {}
    args = EngineArgs(model=path, tokenizer=DEFAULT_MODEL, load_format="dummy")
    async with AsyncLLM.from_engine_args(args) as llm:
        warm_up = planned(50, 64, vocab_size)
        await send_all(EngineTarget(llm, 0.6, detokenize=False), warm_up, time.monotonic(), None)
        for rate in rates:
            reports[f"{model}:{rate:g}"] = await measure(
                llm, planned(rate, round(rate * seconds), vocab_size)
            )
    return reports


def line(name: str, report: Report) -> str:
    """Return the lines of a report."""
    model, _, rate = name.partition(":")
    r = {key: value for key, value in report.items() if isinstance(value, (int, float))}
    return (
        f"{model} at {rate}/s: TTFT p50/p99 {r['ttft_ms_p50']:.1f}/{r['ttft_ms_p99']:.1f} ms, "
        f"ITL p50/p99 {r['itl_ms_p50']:.2f}/{r['itl_ms_p99']:.1f} ms, "
        f"{r['output_tokens_per_s']:.0f} tok/s, failed "
        f"{r['failed']:.0f} ({PEER.get((model, int(float(rate))), 'vLLM: not measured')})\n"
        f"    behind {r['behind']:.1%} (tail {r['tail']:.1%}), "
        f"send lag p99 {r['send_lag_ms_p99']:.1f} ms, "
        f"frontend {r['frontend_us_per_token']:.1f} us a token\n"
        f"    GPU idle {r['device_idle_share']:.2%} with work "
        f"(result {r['device_idle_share_result']:.2%}, "
        f"schedule {r['device_idle_share_schedule']:.2%}, "
        f"prepare {r['device_idle_share_prepare']:.2%}); "
        f"the driver saw it idle {r['driver_idle_share']:.1%} of all time, "
        f"the gauge {r['gauge_idle_share']:.1%}"
    )


def parse(text: str) -> Load:
    """Return the model and the rate of a text like qwen3-0.6b:60."""
    model, _, rate = text.partition(":")
    return model, float(rate)


def main() -> None:
    """Measure all loads, print their figures and write them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--loads",
        nargs="+",
        type=parse,
        default=[("qwen3-0.6b", 60), ("qwen3-0.6b", 120), ("llama-3.1-8b", 50)],
    )
    parser.add_argument("--seconds", type=float, default=12)
    parser.add_argument("--json", help="also write the figures to a file")
    args = parser.parse_args()
    reports: dict[str, Report] = {}
    for model in dict.fromkeys(model for model, _ in args.loads):
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            reports |= runner.run(
                run_model(model, [rate for name, rate in args.loads if name == model], args.seconds)
            )
    print("\n".join(line(name, report) for name, report in reports.items()))
    if args.json:
        Path(args.json).write_text(json.dumps(reports, indent=1))


if __name__ == "__main__":
    main()
