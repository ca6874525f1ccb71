"""Measure the table of docs/performance.md for one GPU: each workload of each model.

Each figure is printed beside that of vLLM 0.26 on an H200.

    python benchmarks/gpu_workloads.py [--models qwen3-0.6b ...] [--option max_num_seqs=512 ...]
        [--json FILE] [--steps]

The weights are random, in bf16 or in the form that a model's name ends with. Each model runs in a
process of its own. The start is timed from the creation of that process to a ready engine, first
with an empty kernel cache, then with the cache that the first start left behind. The bytecode of
all modules is there, as after an installation. --steps also prints the device's time by kind of
step.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sidestep.ipc.transport.records import StepRecord

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

WORKLOADS = ("single", "single8", "mixed256", "fixed512")
# The same workloads as (vLLM 0.26, our target). A single request is in ms a token, the others in
# tokens/s.
TARGETS = {
    "qwen3-0.6b": {
        "mixed256": (23350, 28000),
        "single": (1.856, 0.85),
        "single8": (3269, 6500),
        "fixed512": (19970, 22500),
    },
    "llama-3.1-8b": {
        "mixed256": (9841, 10800),
        "single": (5.018, 4.1),
        "single8": (1482, 1750),
        "fixed512": (6191, 6800),
    },
    "llama-3.1-8b-fp8": {
        "mixed256": (12358, 14500),
        "single": (3.521, 2.45),
        "single8": (2092, 2900),
        "fixed512": (8720, 9600),
    },
    "llama-3.1-8b-awq": {
        "mixed256": (10186, 12000),
        "single": (3.983, 1.75),
        "single8": (1848, 3400),
        "fixed512": (6883, 6900),
    },
    "qwen3-30b-a3b": {
        "mixed256": (5688, 7500),
        "single": (4.174, 2.2),
        "single8": (593, 950),
        "fixed512": (7709, 9500),
    },
}
START_TARGETS = {"cold": 15.0, "warm": 8.0}


def measure(llm: Any, name: str, vocab_size: int) -> tuple[float, float]:
    """Return the seconds of a workload, and the number of its output tokens."""
    from benchmarks.workloads import offline
    from sidestep import SamplingParams

    load = offline(name, vocab_size)
    params = [
        SamplingParams(
            temperature=load.temperature, max_tokens=n, ignore_eos=True, detokenize=False
        )
        for n in load.max_tokens
    ]
    llm.reset_prefix_cache()
    start = time.perf_counter()
    outputs = llm.generate(load.prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    tokens = sum(len(out.outputs[0].token_ids) for out in outputs)
    assert tokens == sum(load.max_tokens)
    return seconds, tokens


ROWS_OF_KINDS = (1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)


def kinds_of_steps(records: Sequence[StepRecord]) -> dict[str, tuple[int, float, float]]:
    """Return the number of steps, their device seconds and their mean cost, by kind of step.

    The mean cost is in milliseconds a step, or a thousand tokens where there are prompts.
    """
    kinds: dict[str, list[StepRecord]] = {}
    for record in records:
        most = next((n for n in ROWS_OF_KINDS if record.num_rows <= n), record.num_rows)
        kind = "with prompts" if record.num_tokens > record.num_rows else f"to {most} rows"
        kinds.setdefault(kind, []).append(record)
    found = {}
    for kind, steps in kinds.items():
        seconds = sum(r.end_ns - r.start_ns for r in steps) / 1e9
        per = sum(r.num_tokens for r in steps) / 1e3 if kind == "with prompts" else len(steps)
        found[kind] = (len(steps), seconds, seconds * 1e3 / per)
    return found


def child(model: str, born: float, workloads: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """Return everything that one process measures."""
    from benchmarks.workloads import MODELS, write_model
    from sidestep import DEFAULT_MODEL, LLM

    path = write_model(model, tempfile.mkdtemp())
    with LLM(path, tokenizer=DEFAULT_MODEL, load_format="dummy", **options) as llm:
        result: dict[str, Any] = {"start": time.time() - born}
        if workloads:
            measure(llm, "single", 1000)
        for name in workloads:
            before = llm.get_stats()
            runs = [
                measure(llm, name, MODELS[model]["vocab_size"])
                for _ in range(2 if "single" in name else 1)
            ]
            after = llm.get_stats()
            seconds, tokens = min(runs)
            result[name] = seconds / tokens * 1e3 if name == "single" else tokens / seconds
            busy, idle = (after[k] - before[k] for k in ("device_busy_s", "device_idle_s"))
            result[f"{name} idle"] = idle / (busy + idle)
            result[f"{name} steps"] = kinds_of_steps(llm.get_step_records(int(before["num_steps"])))
        return result


def run_child(
    model: str, cache: str, workloads: tuple[str, ...], options: list[str]
) -> dict[str, Any]:
    """Measure a model in a process of its own, with its kernels in the folder `cache`."""
    command = [
        sys.executable,
        __file__,
        "--child",
        model,
        "--born",
        repr(time.time()),
        "--workloads",
        *workloads,
    ]
    for option in options:
        command += ["--option", option]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_CACHE_DIR": cache}, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        sys.exit(f"{model}: the run failed")
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def print_steps(model: str, result: dict[str, Any]) -> None:
    """Print the kinds of steps of each workload, the longest first."""
    for name in WORKLOADS:
        for kind, (number, seconds, each) in sorted(
            result.get(f"{name} steps", {}).items(), key=lambda e: -e[1][1]
        ):
            unit = "ms a thousand tokens" if kind == "with prompts" else "ms each"
            print(
                f"{model:14} {name:10} {number:6} steps {kind:14} {seconds:7.3f} s  "
                f"{each:8.3f} {unit}"
            )


def print_table(model: str, result: dict[str, Any]) -> None:
    """Print a model's figures beside those of vLLM and the targets."""
    for kind in ("cold", "warm"):
        print(
            f"{model:14} start, {kind:9} {result[kind]:9.1f} s           "
            f"reach {START_TARGETS[kind]:8.1f}"
        )
    for name in WORKLOADS:
        if name in result:
            peer, reach = TARGETS.get(model, {}).get(name, (math.nan, math.nan))
            unit = "ms/token" if name == "single" else "tokens/s"
            print(
                f"{model:14} {name:16} {result[name]:9.4g} {unit}    vLLM {peer:8g}    "
                f"reach {reach:8g}    GPU idle {result[name + ' idle']:5.1%}"
            )


def main() -> None:
    """Measure the chosen models, and print and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["qwen3-0.6b", "llama-3.1-8b"])
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--option", action="append", default=[], help="name=value, for the engine")
    parser.add_argument("--steps", action="store_true", help="also print the steps by kind")
    parser.add_argument("--json", help="also write the figures to a file")
    parser.add_argument("--child")
    parser.add_argument("--born", type=float)
    args = parser.parse_args()
    if args.child:
        options = {
            name: json.loads(value) for name, _, value in (o.partition("=") for o in args.option)
        }
        print(json.dumps(child(args.child, args.born, args.workloads, options)))
        return
    from benchmarks.starts.bytecode import write_bytecode

    write_bytecode()
    results = {}
    with tempfile.TemporaryDirectory() as root:
        for model in args.models:
            cache = os.path.join(root, model)
            cold = run_child(model, cache, (), args.option)
            results[model] = run_child(model, cache, tuple(args.workloads), args.option)
            results[model] |= {"cold": cold["start"], "warm": results[model]["start"]}
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))
    for model, result in results.items() if args.steps else ():
        print_steps(model, result)
    for model, result in results.items():
        print_table(model, result)


if __name__ == "__main__":
    main()
