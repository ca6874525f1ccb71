"""Measure tokens a second on a CPU, beside transformers: same weights, same machine, one run.

    python benchmarks/engine/cpu_peers.py [--threads 2] [--tokens 96]
        [--models 3m 440m experts hybrid] [--forms float32 bfloat16 int8 int4]
        [--llama-python PYTHON]

It decodes 1 and 8 streams greedily, with prompts of 64 random tokens, and reads one prompt of 512
tokens, whose figure is its tokens by the time to the first token of output. It does so through

- sidestep: AsyncLLM, with all of its processes;
- transformers generate: a static batch, whose prompts have one length by construction;
- transformers continuous batching: its streaming manager, with all requests added at once;
- llama.cpp: only with --llama-python, a Python that has llama-cpp-python and gguf, and not with
  the hybrid shape.

Each contender runs in a process of its own, one after the other; each figure is the best of --runs.
The weights are random. int8 and int4 are the same weights with fewer bits: sidestep rounds them
while it loads (`quantization`), llama.cpp gets Q8_0 and Q4_0, and transformers is left out. For
bfloat16 the files have that type; sidestep computes in float32 as ever on a CPU, and llama.cpp gets
BF16. It needs the `bench` extra (accelerate).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "3m": {
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "vocab_size": 4096,
    },
    "440m": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 32000,
    },
    "experts": {
        "hidden_size": 1024,
        "intermediate_size": 512,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
    },
    "hybrid": {
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "vocab_size": 32000,
    },
}
CONFIGS = {"experts": "MixtralConfig", "hybrid": "Qwen3_5TextConfig"}
"""Shape -> its configuration in transformers; others are Llamas."""
LLAMA_FORMS = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
"""Form of the weights -> llama.cpp's name of the same number of bits."""
ROUNDED = ("int8", "int4")
"""Forms that are made of float32 files."""
STREAMS = (1, 8)
PROMPT, LONG_PROMPT = 64, 512
COLUMNS = (*(f"{streams} streams" for streams in STREAMS), f"{LONG_PROMPT} in")


def write_model(shape: str, folder: Path, dtype: str) -> None:
    """Write a random model in the Hugging Face layout, with the bundled model's tokenizer.

    No contender reads the text. dtype: of the files.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, CONFIGS.get(shape, "LlamaConfig"))
    transformers.AutoModelForCausalLM.from_config(
        config(
            **SHAPES[shape],
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).to(getattr(torch, dtype)).save_pretrained(folder)
    bundled = Path(__file__).parents[2] / "examples" / "tiny-python"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((bundled / name).read_text())


def prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Return random token ids, different in every run so that no prefix is cached."""
    rng = random.Random(seed)
    return [[rng.randrange(min(4000, vocab_size)) for _ in range(length)] for _ in range(count)]


def measure(run: Any, args: argparse.Namespace, vocab_size: int) -> list[float]:
    """Return the best tokens/s of each column.

    run: takes prompts and a number of output tokens for each, and returns when it has them.
    """
    run(prompts(1, PROMPT, vocab_size, 99), args.tokens)
    run(prompts(1, LONG_PROMPT, vocab_size, 98), 1)
    cases = [(streams, PROMPT, args.tokens) for streams in STREAMS]
    result = []
    for streams, length, tokens in [*cases, (1, LONG_PROMPT, 1)]:
        best = 0.0
        for attempt in range(args.runs):
            batch = prompts(streams, length, vocab_size, attempt)
            start = time.perf_counter()
            run(batch, tokens)
            counted = streams * tokens if tokens > 1 else length
            best = max(best, counted / (time.perf_counter() - start))
        result.append(best)
    return result


def contend_sidestep(folder: str, args: argparse.Namespace) -> list[float]:
    """Measure sidestep's AsyncLLM."""
    import asyncio

    from sidestep import AsyncLLM, EngineArgs, RequestOutputKind, SamplingParams

    llm = AsyncLLM.from_engine_args(
        EngineArgs(
            model=folder,
            device="cpu",
            dtype="float32",
            cpu_threads=args.threads,
            quantization=args.form if args.form in ROUNDED else None,
        )
    )

    async def one(prompt: list[int], tokens: int) -> None:
        params = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        outputs = [output async for output in llm.generate(prompt, params)]
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == tokens

    async def run(batch: list[list[int]], tokens: int) -> None:
        await asyncio.gather(*(one(prompt, tokens) for prompt in batch))

    vocab_size = SHAPES[args.shape]["vocab_size"]
    with asyncio.Runner() as runner:
        result = measure(lambda *given: runner.run(run(*given)), args, vocab_size)
    llm.shutdown()
    return result


def load_transformers(folder: str, threads: int) -> Any:
    """Return the model in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def contend_generate(folder: str, args: argparse.Namespace) -> list[float]:
    """Measure transformers with a static batch."""
    import torch

    model = load_transformers(folder, args.threads)

    def run(batch: list[list[int]], tokens: int) -> None:
        ids = torch.tensor(batch)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
        assert out.shape[1] == ids.shape[1] + tokens

    return measure(run, args, SHAPES[args.shape]["vocab_size"])


def contend_continuous(folder: str, args: argparse.Namespace) -> list[float]:
    """Measure transformers' continuous batching by its streaming manager."""
    from transformers import GenerationConfig

    model = load_transformers(folder, args.threads)
    config = GenerationConfig(
        max_new_tokens=args.tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    manager = model.init_continuous_batching(generation_config=config)
    manager.start()

    def run(batch: list[list[int]], tokens: int) -> None:
        ids = {
            manager.add_request(prompt, max_new_tokens=tokens, streaming=True) for prompt in batch
        }
        while ids:
            result = manager.get_result(timeout=60)
            if result is None:
                raise RuntimeError("continuous batching gave nothing for 60 s")
            if result.is_finished():
                ids.discard(result.request_id)

    try:
        return measure(run, args, SHAPES[args.shape]["vocab_size"])
    finally:
        manager.stop(block=True)


LLAMA_CPP = r"""
import json, sys, time, threading, random
import numpy as np, gguf
from safetensors import safe_open
folder, shape = sys.argv[1], json.loads(sys.argv[2])
threads, tokens, runs = map(int, sys.argv[3:6])
form = gguf.GGMLQuantizationType[sys.argv[6]]
path = folder + "/model.gguf"
w = gguf.GGUFWriter(path, "llama")
heads, kv = shape["num_attention_heads"], shape["num_key_value_heads"]
w.add_context_length(2048); w.add_embedding_length(shape["hidden_size"])
w.add_block_count(shape["num_hidden_layers"])
w.add_feed_forward_length(shape["intermediate_size"])
w.add_head_count(heads); w.add_head_count_kv(kv)
w.add_layer_norm_rms_eps(1e-6); w.add_rope_freq_base(10000.0); w.add_vocab_size(shape["vocab_size"])
w.add_rope_dimension_count(shape["hidden_size"] // heads); w.add_file_type(
    {"F32": 0, "Q4_0": 2, "Q8_0": 7, "BF16": 32}[form.name])
experts = shape.get("num_local_experts")
if experts:
    w.add_expert_count(experts); w.add_expert_used_count(shape["num_experts_per_tok"])
w.add_tokenizer_model("gpt2")
w.add_token_list([str(i).encode() for i in range(shape["vocab_size"])])
w.add_token_merges(["0 1"])
names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
         "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
         "post_attention_layernorm": "ffn_norm", "block_sparse_moe.gate": "ffn_gate_inp"}
stacks = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}
def permute(a, n):
    return a.reshape(n, 2, a.shape[0] // n // 2, a.shape[1]).swapaxes(1, 2).reshape(a.shape)
with safe_open(folder + "/wide.safetensors", "np") as f:
    for key in f.keys():
        layer, _, rest = key.removeprefix("model.layers.").partition(".")
        if ".experts." in key:
            one = rest.split(".")[-2]
            if ".experts.0." not in key: continue
            keys = [key.replace(".experts.0.", f".experts.{e}.") for e in range(experts)]
            a = np.stack([f.get_tensor(k) for k in keys])
            name = f"blk.{layer}.{stacks[one]}.weight"
        elif key.startswith("model.layers."):
            a = f.get_tensor(key)
            rest = rest.removesuffix(".weight")
            if rest.endswith("q_proj"): a = permute(a, heads)
            if rest.endswith("k_proj"): a = permute(a, kv)
            name = f"blk.{layer}.{names[rest]}.weight"
        else:
            a = f.get_tensor(key)
            name = {"model.embed_tokens.weight": "token_embd.weight",
                    "model.norm.weight": "output_norm.weight"}[key]
        a = np.ascontiguousarray(a)
        if form.name == "F32" or a.ndim == 1 or "gate_inp" in name:
            w.add_tensor(name, a)
        else:
            w.add_tensor(name, gguf.quantize(a, form), raw_dtype=form)
w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()
import llama_cpp as L
L.llama_backend_init()
model = L.llama_model_load_from_file(path.encode(), L.llama_model_default_params())
p = L.llama_context_default_params()
p.n_ctx, p.n_batch, p.n_ubatch, p.n_seq_max = 8 * 256, 1024, 1024, 8
p.n_threads = p.n_threads_batch = threads
p.kv_unified = True
ctx = L.llama_init_from_model(model, p)
V = shape["vocab_size"]
def run(batch, tokens):
    L.llama_memory_clear(L.llama_get_memory(ctx), True)
    b = L.llama_batch_init(1024, 0, 1)
    def put(i, token, pos, seq, logits):
        b.token[i], b.pos[i], b.n_seq_id[i], b.seq_id[i][0] = token, pos, 1, seq
        b.logits[i] = logits
    n = 0
    for s, prompt in enumerate(batch):
        for j, t in enumerate(prompt):
            put(n, t, j, s, j == len(prompt) - 1); n += 1
    b.n_tokens = n
    assert L.llama_decode(ctx, b) == 0
    size = len(batch[0])
    rows = [size * (s + 1) - 1 for s in range(len(batch))]
    for step in range(tokens):
        found = [np.ctypeslib.as_array(L.llama_get_logits_ith(ctx, r), (V,)) for r in rows]
        ids = [int(logits.argmax()) for logits in found]
        if step == tokens - 1: break
        for s, t in enumerate(ids): put(s, t, size + step, s, True)
        b.n_tokens = len(batch)
        assert L.llama_decode(ctx, b) == 0
        rows = list(range(len(batch)))
    L.llama_batch_free(b)
result = []
run([[1] * 64], tokens)
for streams, size, made in ((1, 64, tokens), (8, 64, tokens), (1, 512, 1)):
    best = 0.0
    for a in range(runs):
        rng = random.Random(a)
        batch = [[rng.randrange(4000) for _ in range(size)] for _ in range(streams)]
        start = time.perf_counter(); run(batch, made)
        counted = streams * made if made > 1 else size
        best = max(best, counted / (time.perf_counter() - start))
    result.append(best)
print("RESULT " + json.dumps(result))
"""


def contend_llama_cpp(folder: str, args: argparse.Namespace) -> list[float]:
    """Measure llama.cpp's library in a bare loop.

    There is no server and no text, so this is the most that it could give.
    """
    from safetensors.torch import load_file, save_file

    # numpy has no bfloat16.
    numbers = load_file(f"{folder}/model.safetensors").items()
    save_file({name: one.float() for name, one in numbers}, f"{folder}/wide.safetensors")
    sizes = [str(args.threads), str(args.tokens), str(args.runs), LLAMA_FORMS[args.form]]
    done = subprocess.run(
        [args.llama_python, "-c", LLAMA_CPP, folder, json.dumps(SHAPES[args.shape]), *sizes],
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise RuntimeError(done.stderr[-2000:])
    result: list[float] = json.loads(lines[0].removeprefix("RESULT "))
    return result


CONTENDERS = {
    "sidestep": contend_sidestep,
    "transformers generate": contend_generate,
    "transformers continuous batching": contend_continuous,
    "llama.cpp": contend_llama_cpp,
}


def contenders(shape: str, form: str, args: argparse.Namespace) -> list[str]:
    """Return the names of those that can run a shape with weights of a form."""
    names = ["sidestep"]
    if form == "float32":
        names += ["transformers generate", "transformers continuous batching"]
    if args.llama_python and shape != "hybrid":
        names.append("llama.cpp")
    return names


def run_child(
    name: str, folder: str, shape: str, form: str, args: argparse.Namespace
) -> list[float] | None:
    """Run one contender in a process of its own, and return its figures, or None if it failed."""
    command = [
        sys.executable,
        __file__,
        "--contender",
        name,
        "--folder",
        folder,
        "--shape",
        shape,
        "--form",
        form,
        "--threads",
        str(args.threads),
        "--tokens",
        str(args.tokens),
        "--runs",
        str(args.runs),
    ]
    if args.llama_python:
        command += ["--llama-python", args.llama_python]
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        print(f"{name} failed:\n{done.stderr[-1500:]}", file=sys.stderr)
        return None
    result: list[float] = json.loads(lines[0].removeprefix("RESULT "))
    return result


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["3m", "440m"])
    parser.add_argument("--forms", nargs="+", choices=LLAMA_FORMS, default=["float32"])
    parser.add_argument("--llama-python", help="a Python that has llama-cpp-python and gguf")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--shape", help=argparse.SUPPRESS)
    parser.add_argument("--form", default="float32", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contender:
        print("RESULT " + json.dumps(CONTENDERS[args.contender](args.folder, args)))
        return
    print(
        f"{args.threads} threads, {PROMPT} tokens in, {args.tokens} out, "
        f"tokens/s (best of {args.runs})"
    )
    print(
        f"{'model':<8} {'weights':<8} {'contender':<34}"
        + "".join(f"{name:>12}" for name in COLUMNS)
    )
    for shape in args.models:
        for form in args.forms:
            with tempfile.TemporaryDirectory() as folder:
                write_model(shape, Path(folder), "bfloat16" if form == "bfloat16" else "float32")
                for name in contenders(shape, form, args):
                    result = run_child(name, folder, shape, form, args)
                    cells = [f"{one:>12.1f}" for one in result] if result else ["      failed"]
                    print(f"{shape:<8} {form:<8} {name:<34}" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
