"""Measure each type of weights on this CPU: its speed, and whether requests affect each other.

    python benchmarks/engine/cpu_dtypes.py [--model FOLDER] [--threads 2] [--load-format dummy]

For float32, bfloat16 and float16, print the output tokens a second of 1 and of 8 requests at once.
Then run 40 prompts together and each alone, half of them greedy and half with seeds, and print how
many give other tokens. That number must be 0.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from sidestep import DEFAULT_MODEL, LLM, SamplingParams

PROMPTS = [
    f"{beginning}{i}"
    for i in range(10)
    for beginning in (
        "def get_name_",
        "class Stack",
        "import os\n\n\ndef read_file_",
        "for i in range(1",
    )
]
NUM_TOKENS = 96


def tokens_per_second(llm: LLM, streams: int) -> float:
    """Return the output tokens a second of this many requests at once: the best of three runs."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    best = 0.0
    for _ in range(3):
        start = time.perf_counter()
        llm.generate(PROMPTS[:streams], params, use_tqdm=False)
        best = max(best, streams * NUM_TOKENS / (time.perf_counter() - start))
    return best


def outputs(llm: LLM, numbers: Sequence[int]) -> list[list[int]]:
    """Return the tokens of these prompts, computed all at once and without cached prefixes."""
    llm.reset_prefix_cache()
    params = [
        SamplingParams(temperature=i % 2, seed=i, max_tokens=48, ignore_eos=True) for i in numbers
    ]
    done = llm.generate([PROMPTS[i] for i in numbers], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in done]


def main() -> None:
    """Print a line for each type."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument(
        "--threads", type=int, help="of the worker; as the engine chooses by default"
    )
    parser.add_argument("--load-format", default="auto")
    args = parser.parse_args()
    print(
        f"{'dtype':<10} {'tok/s, 1':>10} {'tok/s, 8':>10} {'differ, greedy':>15} "
        f"{'differ, seeded':>15}"
    )
    everybody = range(len(PROMPTS))
    for dtype in ("float32", "bfloat16", "float16"):
        with LLM(
            args.model,
            device="cpu",
            dtype=dtype,
            cpu_threads=args.threads,
            load_format=args.load_format,
            max_model_len=512,
        ) as llm:
            speeds = [tokens_per_second(llm, streams) for streams in (1, 8)]
            together, alone = outputs(llm, everybody), [outputs(llm, [i])[0] for i in everybody]
        differ = [
            sum(a != b for a, b in list(zip(together, alone, strict=True))[kind::2])
            for kind in (0, 1)
        ]
        print(f"{dtype:<10} {speeds[0]:>10.0f} {speeds[1]:>10.0f} {differ[0]:>15} {differ[1]:>15}")


if __name__ == "__main__":
    main()
