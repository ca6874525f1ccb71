"""How near a model with keys and values as codes is to the same model without.

python -m benchmarks.engine.kv_quality [--model M] [--dtype D] [--tokens 512] [--texts 40]

The texts are files of Python's standard library, from their beginnings. Printed for each format:
the mean negative log-likelihood of a token in nats, the mean difference of a token's
log-probability from that without codes, and the share of positions with the same likeliest token.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from sidestep import DEFAULT_MODEL, LLM, RequestOutput, SamplingParams
from sidestep.ipc.model.kv.kv_cache_dtype import AUTO

FORMATS = (AUTO, "fp8", "int8", "int4_per_token_head")
Position = tuple[float, int]
"""The log-probability of the token there, and the likeliest token."""


def positions(output: RequestOutput) -> list[Position]:
    """Return what the model says of each token of a prompt but the first."""
    found = zip(output.prompt_token_ids[1:], (output.prompt_logprobs or [])[1:], strict=True)
    return [
        (entries[token].logprob, min(entries, key=lambda one: entries[one].rank or 0))
        for token, entries in found
        if entries is not None
    ]


def main() -> None:
    """Print a line for each format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--texts", type=int, default=40)
    options = parser.parse_args()
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    texts = [file.read_text("utf-8", "ignore") for file in files]
    plain: list[Position] = []
    for kv_format in FORMATS:
        with LLM(options.model, dtype=options.dtype, kv_cache_dtype=kv_format) as llm:
            tokenizer = llm.get_tokenizer()
            ids = (list(tokenizer.encode(text[: 8 * options.tokens])) for text in texts)
            prompts = [own[: options.tokens] for own in ids if len(own) >= options.tokens]
            asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
            outputs = llm.generate(
                [{"prompt_token_ids": own} for own in prompts[: options.texts]],
                asked,
                use_tqdm=False,
            )
        found = [one for output in outputs for one in positions(output)]
        plain = plain or found
        pairs = list(zip(plain, found, strict=True))
        print(
            f"{kv_format:22} {-sum(one[0] for one in found) / len(found):.4f} nats  "
            f"{sum(abs(a[0] - b[0]) for a, b in pairs) / len(pairs):.4f} apart  "
            f"{sum(a[1] == b[1] for a, b in pairs) / len(pairs):.2%} the same  "
            f"({len(found)} tokens)",
            flush=True,
        )


if __name__ == "__main__":
    main()
