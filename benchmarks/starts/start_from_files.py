"""Measure an engine's start on a GPU from files of weights that the page cache holds.

    python benchmarks/starts/start_from_files.py [--models llama-3.1-8b llama-3.1-8b-awq]
        [--runs 2] [--folder /dev/shm]

It writes files with random weights of these models, of Llama's shape, into the folder. Each start
is timed from the creation of its process to a ready engine: first with an empty kernel cache, then
`runs` times with the cache that the first start left behind. A few tokens are generated after it.
The weights are always the same, so two versions should give the same tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
FILE_BYTES = 4 << 30
"""Bytes of a file at least, but for the last one."""
PROMPTS = [[1, 2, 3, 4], [*range(5, 300)]]


def matrices(config: dict[str, Any]) -> Iterator[tuple[str, int, int]]:
    """Yield the name, outputs and inputs of each matrix of the layers."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    size = hidden // config["num_attention_heads"]
    own = config["num_key_value_heads"] * size
    for layer in range(config["num_hidden_layers"]):
        for name, rows, columns in (
            ("self_attn.q_proj", hidden, hidden),
            ("self_attn.k_proj", own, hidden),
            ("self_attn.v_proj", own, hidden),
            ("self_attn.o_proj", hidden, hidden),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            yield f"model.layers.{layer}.{name}", rows, columns


def tensors(config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of a model, plain or as AWQ has them."""
    import torch

    dtype = getattr(torch, config["torch_dtype"])
    hidden, vocab = config["hidden_size"], config["vocab_size"]

    def plain(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda").normal_(0.0, 0.02).cpu()

    def words(*shape: int) -> Tensor:
        return torch.randint(-(1 << 31), 1 << 31, shape, device="cuda").int().cpu()

    yield "model.embed_tokens.weight", plain(vocab, hidden)
    for name, rows, columns in matrices(config):
        if "quantization_config" not in config:
            yield f"{name}.weight", plain(rows, columns)
            continue
        groups = columns // config["quantization_config"]["group_size"]
        yield f"{name}.qweight", words(columns, rows // 8)
        yield f"{name}.qzeros", words(groups, rows // 8)
        yield f"{name}.scales", plain(groups, rows).abs() / 4
    for layer in range(config["num_hidden_layers"]):
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{layer}.{name}.weight", torch.ones(hidden, dtype=dtype)
    yield "model.norm.weight", torch.ones(hidden, dtype=dtype)
    yield "lm_head.weight", plain(vocab, hidden)


def write_files(model: str, folder: Path) -> None:
    """Write the files of a model."""
    import torch
    from safetensors.torch import save_file

    from benchmarks.workloads import MODELS

    torch.manual_seed(0)
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    written: dict[str, str] = {}
    kept: dict[str, Tensor] = {}
    for name, tensor in tensors(MODELS[model]):
        kept[name] = tensor
        last = name == "lm_head.weight"
        if last or sum(one.nbytes for one in kept.values()) > FILE_BYTES:
            file = f"model-{len(set(written.values())):05d}.safetensors"
            save_file(kept, folder / file)
            written.update(dict.fromkeys(kept, file))
            kept = {}
    index = {"metadata": {}, "weight_map": written}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def child(folder: str, born: float) -> None:
    """Start an engine, and print the seconds to ready and some tokens."""
    from sidestep import DEFAULT_MODEL, LLM, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    with LLM(folder, tokenizer=DEFAULT_MODEL) as llm:
        seconds = time.time() - born
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        print(f"{seconds:7.2f} s", *(list(out.outputs[0].token_ids) for out in outputs))


def main() -> None:
    """Write the files of each model, and start an engine from them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["llama-3.1-8b", "llama-3.1-8b-awq"])
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--folder", default="/dev/shm")
    parser.add_argument("--child")
    parser.add_argument("--born", type=float)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.born)
        return
    for model in args.models:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            write_files(model, Path(folder))
            with tempfile.TemporaryDirectory() as cache:
                for run in range(1 + args.runs):
                    command = [sys.executable, __file__, "--child", folder]
                    done = subprocess.run(
                        [*command, "--born", repr(time.time())],
                        env={**os.environ, "TRITON_CACHE_DIR": cache},
                        capture_output=True,
                        text=True,
                        check=True,
                    )
                    print(f"{model:18} {'warm' if run else 'cold'} {done.stdout.strip()}")


if __name__ == "__main__":
    main()
