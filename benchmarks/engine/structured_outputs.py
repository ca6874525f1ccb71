"""Measure the cost of holding requests to a JSON schema: the same load with and without it.

    python benchmarks/engine/structured_outputs.py [--model qwen3-0.6b] [--requests 64]
        [--option max_num_seqs=64 ...] [--free] [--parts]

The two loads alternate in one engine. The weights are random and tokens are drawn at temperature 1,
so that the schema's strings and numbers have all lengths. The tokenizer is generated in the size of
the model's vocabulary. Without --model it is the bundled model. The script prints tokens a second
of each round and the ratio of their medians; the target on an H200 is at least 0.95 with 64
requests. --free removes the bound on names, as in most schemas; masks near the end of a bounded
string take longest. --parts also prints the time of each part between one step and the next.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.workloads import MODELS, prompts, write_model
from sidestep import DEFAULT_MODEL, LLM, SamplingParams, StepRecord, StructuredOutputsParams

ITEM = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "age", "tags", "address"],
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
        "address": {
            "type": "object",
            "additionalProperties": False,
            "required": ["street", "zip"],
            "properties": {
                "street": {"type": "string"},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
        },
    },
}
SCHEMA: dict[str, Any] = {"type": "array", "items": ITEM, "minItems": 1000}
"""Schema that no output completes before its token limit, so both loads have equal token counts."""


def unbounded() -> dict[str, Any]:
    """Return SCHEMA without a bound on its strings."""
    schema = copy.deepcopy(SCHEMA)
    del schema["items"]["properties"]["name"]["maxLength"]
    return schema


def write_tokenizer(folder: str, size: int) -> str:
    """Write a tokenizer of the given size, and return its folder.

    It is the bundled model's, with further tokens that each join two of its own.
    """
    made = json.loads((Path(DEFAULT_MODEL) / "tokenizer.json").read_text())
    vocab, merges = made["model"]["vocab"], made["model"]["merges"]
    rng, words = random.Random(0), [token for token in vocab if len(token) > 2]
    while len(vocab) < size:
        first, second = rng.choice(words), rng.choice(words)
        if first + second not in vocab:
            vocab[first + second] = len(vocab)
            merges.append([first, second] if isinstance(merges[0], list) else f"{first} {second}")
    (Path(folder) / "tokenizer.json").write_text(json.dumps(made))
    shutil.copy(Path(DEFAULT_MODEL) / "tokenizer_config.json", folder)
    return folder


def measure(llm: LLM, load: list[list[int]], params: SamplingParams) -> float:
    """Return the output tokens a second."""
    llm.reset_prefix_cache()
    start = time.perf_counter()
    outputs = llm.generate(load, params, use_tqdm=False)
    return sum(len(out.outputs[0].token_ids) for out in outputs) / (time.perf_counter() - start)


def print_parts(records: list[StepRecord]) -> None:
    """Print the median and the 90th percentile of each part of a step, in microseconds.

    Only steps with the most rows count, after such steps. The parts are in the order in which they
    occur; `before` and `after` are a step's neighbours.
    """
    most = max(record.num_rows for record in records)
    threes = [
        three
        for three in zip(records, records[1:], records[2:], strict=False)
        if all(r.num_rows == r.num_tokens == most for r in three)
    ]
    parts: dict[str, Callable[[StepRecord, StepRecord, StepRecord], int]] = {
        "the device ran": lambda before, step, after: step.end_ns - step.start_ns,
        "it stood still before": lambda before, step, after: step.idle_ns,
        "from its end to the core": lambda before, step, after: step.taken_ns - step.end_ns,
        "until the step after next was scheduled": lambda before, step, after: (
            after.schedule_ns - before.taken_ns
        ),
        "scheduling": lambda before, step, after: step.submit_ns - step.schedule_ns,
        "from the result before to launched": lambda before, step, after: (
            step.launched_ns - before.taken_ns
        ),
        "from received to launched": lambda before, step, after: (
            step.launched_ns - step.received_ns
        ),
    }
    for name, part in parts.items():
        ordered = sorted(part(*three) for three in threes)
        print(
            f"    {name:42}{statistics.median(ordered) / 1e3:8.0f}"
            f"{ordered[len(ordered) * 9 // 10] / 1e3:8.0f}"
        )


def main() -> None:
    """Run both loads in turns and print the ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(MODELS))
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--option", action="append", default=[], help="name=value, for the engine")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--free", action="store_true")
    parser.add_argument("--parts", action="store_true")
    args = parser.parse_args()
    options: dict[str, Any] = {
        name: json.loads(value) for name, _, value in (o.partition("=") for o in args.option)
    }
    with tempfile.TemporaryDirectory() as root:
        path, size = DEFAULT_MODEL, 4096
        if args.model:
            path, size = write_model(args.model, root), MODELS[args.model]["vocab_size"]
            options |= {"tokenizer": write_tokenizer(root, size), "load_format": "dummy"}
        plain = SamplingParams(
            temperature=1, max_tokens=args.tokens, ignore_eos=True, detokenize=False
        )
        held = SamplingParams(
            temperature=1,
            max_tokens=args.tokens,
            detokenize=False,
            structured_outputs=StructuredOutputsParams(
                json=unbounded() if args.free else SCHEMA, disable_any_whitespace=True
            ),
        )
        load = prompts(args.requests, lambda rng: rng.randrange(64, 129), size - 100, seed=1)
        with LLM(path, **options) as llm:
            rates: dict[str, list[float]] = {"plain": [], "held": []}
            for number in range(args.rounds + 1):
                for name, params in (("plain", plain), ("held", held)):
                    since = int(llm.get_stats()["num_steps"])
                    rate = measure(llm, load, params)
                    if number:  # the first warms up
                        rates[name].append(rate)
                        print(f"{name:6} {rate:10.0f} tokens/s", flush=True)
                    if args.parts and number == args.rounds:
                        print_parts(llm.get_step_records(since))
            stats = llm.get_stats()
    busy, idle = stats["device_busy_s"], stats["device_idle_s"]
    ratio = statistics.median(rates["held"]) / statistics.median(rates["plain"])
    print(f"ratio {ratio:.3f}; device idle between steps {idle / (busy + idle):.1%}")


if __name__ == "__main__":
    main()
