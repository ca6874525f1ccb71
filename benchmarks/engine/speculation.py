"""Measure look-up drafts with the bundled model on this CPU, beside the same engine without drafts.

    python benchmarks/engine/speculation.py [--threads 1] [--tokens 160] [--rounds 5] [--exact 1000]

For each prompt and temperature, one request at a time, print the output tokens a second without and
with drafts, in turn, and the acceptance length: tokens of a step that verified drafts. Some prompts
ask the model to repeat or edit code that they contain; the others are the prompts of examples/.

With --exact, run that many requests of all kinds at once, with each number of drafts from 1 to 5,
and print how many give other outputs than without drafts. That number must be 0.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sidestep import DEFAULT_MODEL, LLM, SamplingParams
from tests.e2e.output.test_speculation import CODE, outputs

PROMPTS = {
    "repeat a class": f"{CODE}# The same class once more:\n{CODE}# And again:\nclass",
    "edit a class": f"{CODE}class Queue:\n    def __init__(self):\n",
    "class Stack:": "class Stack:",
    "def get_name(": "def get_name(",
    "def main():": "def main():\n",
    "import os": "import os\n\n\ndef read_file(path):\n",
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


def run(llm: LLM, prompt: str, params: SamplingParams) -> tuple[float, float]:
    """Return output tokens a second of one request, and its acceptance length (1 without)."""
    start = time.perf_counter()
    (made,) = llm.generate([prompt], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    metrics = made.metrics
    length = metrics.acceptance_length if metrics is not None else None
    return len(made.outputs[0].token_ids) / seconds, length or 1.0


def compare(plain: LLM, drafted: LLM, tokens: int, rounds: int) -> None:
    """Print a line for each prompt and temperature."""
    print(f"{'prompt':16} {'T':>4} {'plain':>8} {'drafts':>8} {'times':>6} {'length':>7}")
    for name, prompt in PROMPTS.items():
        for temperature in (0.0, 0.7):
            params = SamplingParams(
                temperature=temperature, seed=1, max_tokens=tokens, ignore_eos=True
            )
            speeds: list[tuple[float, float]] = []
            length = 1.0
            for _ in range(rounds):
                without, _ = run(plain, prompt, params)
                with_drafts, length = run(drafted, prompt, params)
                speeds.append((without, with_drafts))
            before, after = (statistics.median(s[i] for s in speeds) for i in (0, 1))
            times = statistics.median(b / a for a, b in speeds)
            print(
                f"{name:16} {temperature:4} {before:8.0f} {after:8.0f} {times:6.2f} {length:7.2f}",
                flush=True,
            )


def check(plain: LLM, count: int, options: dict[str, object]) -> None:
    """Print how many of these requests give other outputs with drafts."""
    wanted = outputs(plain, count)
    for most in range(1, 6):
        setting = {"method": "ngram", "num_speculative_tokens": most, "prompt_lookup_min": 1}
        with LLM(
            DEFAULT_MODEL, speculative_config=setting | {"adaptive": False}, **options
        ) as drafted:
            got = outputs(drafted, count)
            accepted = drafted.get_stats()["spec_decode_num_accepted_tokens"]
        different = sum(a != b for a, b in zip(got, wanted, strict=True))
        print(f"{most} drafts: {different} of {count} differ, {accepted:.0f} drafts accepted")


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--exact", type=int, default=0)
    asked = parser.parse_args()
    options = {"device": "cpu", "dtype": "float32", "cpu_threads": asked.threads}
    with LLM(DEFAULT_MODEL, **options) as plain:
        if asked.exact:
            check(plain, asked.exact, options)
            return
        with LLM(DEFAULT_MODEL, speculative_config=NGRAM, **options) as drafted:
            compare(plain, drafted, asked.tokens, asked.rounds)


if __name__ == "__main__":
    main()
