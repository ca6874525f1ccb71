"""Measure the table of docs/performance.md for several GPUs of one host.

The model has Llama-3.1-8B's shape, by tensor and pipeline parallel.

    python benchmarks/engine/gpu_parallel.py [--only TP=2 ...] [--option name=value ...]
        [--json FILE]

The weights are random, in bf16. The workloads are those of gpu_workloads.py, and each figure is
printed beside that of vLLM 0.26 on H200s. It runs the layouts for which the machine has enough
GPUs. Pipeline parallel is shown as a multiple of one GPU on the same machine, measured in the same
call.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu_workloads import run_child

MODEL = "llama-3.1-8b"


@dataclass(frozen=True)
class Layout:
    """Layout of the model over GPUs, with its workloads and targets."""

    tensor: int
    pipeline: int
    targets: dict[str, tuple[float | None, float]]
    """Figures of vLLM 0.26 and our targets, by workload.

    A single request is in ms a token, the others in tokens/s; with pipeline parallel the target is
    a multiple of one GPU.
    """

    @property
    def name(self) -> str:
        """Name of the layout, such as TP=2."""
        parts = [f"TP={self.tensor}"] * (self.tensor > 1) + [f"PP={self.pipeline}"] * (
            self.pipeline > 1
        )
        return " ".join(parts) or "one GPU"

    @property
    def options(self) -> list[str]:
        """Options of the engine."""
        sizes = {"tensor_parallel_size": self.tensor, "pipeline_parallel_size": self.pipeline}
        return [f"{name}={size}" for name, size in sizes.items() if size > 1]


LAYOUTS = (
    Layout(1, 1, {"mixed256": (9841, 10800)}),
    Layout(1, 2, {"mixed256": (None, 1.7)}),
    Layout(2, 1, {"single": (3.507, 2.5), "mixed256": (15880, 17000)}),
    Layout(4, 1, {"single": (2.746, 1.8), "mixed256": (20957, 23000), "fixed512": (16787, 18000)}),
)


def num_gpus() -> int:
    """Return the number of this machine's GPUs."""
    listed = subprocess.run(
        ["nvidia-smi", "--list-gpus"], stdout=subprocess.PIPE, text=True, check=True
    )
    return len(listed.stdout.splitlines())


def print_row(layout: Layout, result: dict[str, Any], alone: dict[str, Any] | None) -> None:
    """Print a layout's figures beside those of vLLM, or of one GPU."""
    print(f"{layout.name:9} start {result['start']:20.1f} s")
    for name, (peer, reach) in layout.targets.items():
        value, unit = result[name], "ms/token" if name == "single" else "tokens/s"
        if peer is not None:
            beside = f"vLLM {peer:8g}    reach {reach:8g}"
        else:
            times = "not run" if alone is None else f"x {value / alone[name]:.2f}"
            beside = f"one GPU {times}    reach x {reach:g}"
        print(
            f"{layout.name:9} {name:10} {value:15.4g} {unit}    {beside}    "
            f"GPU idle {result[name + ' idle']:5.1%}"
        )


def main() -> None:
    """Measure the layouts, and print and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=[layout.name for layout in LAYOUTS])
    parser.add_argument("--option", action="append", default=[], help="name=value, for the engine")
    parser.add_argument("--json", help="also write the figures to a file")
    args = parser.parse_args()
    there, results = num_gpus(), dict[str, dict[str, Any]]()
    with tempfile.TemporaryDirectory() as cache:
        for layout in LAYOUTS:
            if layout.tensor * layout.pipeline > there:
                print(f"{layout.name}: this machine has {there} GPUs", file=sys.stderr)
            elif args.only is None or layout.name in args.only:
                results[layout.name] = run_child(
                    MODEL, cache, tuple(layout.targets), [*layout.options, *args.option]
                )
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))
    for layout in LAYOUTS:
        if layout.name in results:
            print_row(layout, results[layout.name], results.get(LAYOUTS[0].name))


if __name__ == "__main__":
    main()
