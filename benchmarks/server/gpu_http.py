"""Measure the cost of HTTP: the same load on an AsyncLLM in this process and on `sidestep serve`.

    python benchmarks/server/gpu_http.py [--model qwen3-0.6b] [--rate 60] [--seconds 12]
        [--device cuda]

The two run one after the other. The weights are random, and the tokenizer is generated in the size
of the model's vocabulary. There are Poisson arrivals of 64 to 1,024 tokens of input, as token ids,
and 32 to 256 of output, all detokenised, after 64 requests to warm up. The output is tokens a
second, TTFT and ITL of both as their client sees them, and the share of the throughput that remains
over HTTP; the aim is 90%.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.engine.structured_outputs import write_tokenizer
from benchmarks.workloads import MODELS, online, write_model
from sidestep import AsyncLLM, EngineArgs
from sidestep.frontend.api.event_loop import new_event_loop
from sidestep.frontend.bench.http_stream import HttpServer
from sidestep.frontend.bench.load import PlannedRequest
from sidestep.frontend.bench.load_http import HttpTarget
from sidestep.frontend.bench.load_report import Report, make_report
from sidestep.frontend.bench.load_send import EngineTarget, Target, send_all
from sidestep.ipc.common.errors import RequestError

START_S = 120.0


def planned(rate: float, count: int, vocab_size: int) -> list[PlannedRequest]:
    """Return `count` requests at a rate a second."""
    return [
        PlannedRequest(prompt, length, at) for at, prompt, length in online(rate, count, vocab_size)
    ]


async def measure(target: Target, args: argparse.Namespace, vocab_size: int) -> Report:
    """Return the load's figures, after a warm-up."""
    await send_all(target, planned(50, 64, vocab_size), time.monotonic(), None)
    begin = time.monotonic()
    return make_report(
        await send_all(
            target, planned(args.rate, round(args.rate * args.seconds), vocab_size), begin, None
        ),
        begin,
        {},
    )


async def in_process(path: str, args: argparse.Namespace, vocab_size: int) -> Report:
    """Measure the load on an engine in this process."""
    engine = EngineArgs(model=path, load_format="dummy", device=args.device)
    async with AsyncLLM.from_engine_args(engine) as llm:
        return await measure(EngineTarget(llm, 0.6), args, vocab_size)


async def over_http(path: str, args: argparse.Namespace, vocab_size: int) -> Report:
    """Measure the load on a server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "sidestep",
        "serve",
        path,
        "--load-format",
        "dummy",
        "--device",
        args.device,
        "--port",
        str(port),
    ]
    process = subprocess.Popen(command, cwd=Path(__file__).resolve().parents[2])
    try:
        server = HttpServer(f"http://127.0.0.1:{port}")
        await ready(server, process)
        return await measure(HttpTarget(server, None, 0.6), args, vocab_size)
    finally:
        process.terminate()
        process.wait()


async def ready(server: HttpServer, process: subprocess.Popen[bytes]) -> None:
    """Wait until the server takes requests. End this process if the server does not start."""
    end = time.monotonic() + START_S
    while True:
        try:
            await server.get("/ready")
            return
        except (RequestError, OSError):
            if process.poll() is not None or time.monotonic() > end:
                sys.exit("the server did not start")
            await asyncio.sleep(0.2)


def line(name: str, report: Report) -> str:
    """Return the line of a report."""
    r = {key: value for key, value in report.items() if isinstance(value, (int, float))}
    return (
        f"{name:11} {r['output_tokens_per_s']:8.0f} tokens/s  "
        f"TTFT p50/p99 {r['ttft_ms_p50']:.1f}/{r['ttft_ms_p99']:.1f} ms  "
        f"ITL p50/p99 {r['itl_ms_p50']:.2f}/{r['itl_ms_p99']:.1f} ms  failed {r['failed']:.0f}"
    )


def main() -> None:
    """Measure both ways and print their figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-0.6b", choices=MODELS)
    parser.add_argument("--rate", type=float, default=60)
    parser.add_argument("--seconds", type=float, default=12)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    vocab_size = MODELS[args.model]["vocab_size"]
    path = write_tokenizer(write_model(args.model, tempfile.mkdtemp()), vocab_size)
    reports = []
    for name, run in (("in process", in_process), ("over HTTP", over_http)):
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            reports.append(runner.run(run(path, args, vocab_size)))
        print(line(name, reports[-1]), flush=True)
    own, http = (report["output_tokens_per_s"] for report in reports)
    assert isinstance(own, float) and isinstance(http, float)
    print(f"HTTP keeps {http / own:.1%} of the throughput")


if __name__ == "__main__":
    main()
