"""Compilation of the kernels for any GPU, with the arguments of their own launchers.

`python -m tests.triton.compiling.compile_kernels CAPABILITY MODEL BLOCK_SIZE WINDOW GROUP...`
prints a line of JSON a kernel. The GPU need not be present. It is a program of its own because a
process has either Triton's interpreter or its compiler. The launchers get tensors without memory
(torch's meta device), as in executor/processes/kernel_compiler.py; each launch ends once compiled.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from sidestep.kernels import launch
from sidestep.kernels.attention import (
    attention_plan_triton,
    decode_attention_triton,
    decode_config,
    prefill_attention_triton,
    qkv_rope_triton,
)
from sidestep.kernels.attention.common.rope import Rope
from sidestep.kernels.attention.decode_scratch import DecodeScratch
from sidestep.kernels.compiling import compile_for, compiling_only
from sidestep.kernels.gpu import Gpu, is_hopper
from sidestep.kernels.ops.rms_norm import BegunNorm, RmsNorm, Stream
from sidestep.kernels.ops.speculation import AcceptedTokens, DraftTables
from sidestep.kernels.products import own_linear, skinny_linear_triton, streamed_config
from sidestep.kernels.products.gated import gated_gemm_triton
from sidestep.kernels.recurrent import begin_states_triton, delta_net_triton
from sidestep.kernels.recurrent.delta_parts import DeltaWeights, Projected
from sidestep.kernels.recurrent.state_rows import StateRows
from sidestep.kernels.speculation import accept_triton, ngram_triton
from sidestep.kernels.sums import all_reduce_triton, peer_memory_triton
from sidestep.kernels.triton import (
    block_copy_triton,
    mask_logits_triton,
    prepare_step_triton,
    rms_norm_triton,
    sampling_triton,
    sigmoid_mul_triton,
    silu_mul_triton,
    token_masks_triton,
)
from tests.triton.compiling.compile_codes import launch_codes
from tests.triton.compiling.compile_experts import launch_experts
from tests.triton.compiling.compile_few import launch_few
from tests.triton.compiling.compile_quantized import FORMS, MAIN_FORMS, Form, launch_quantized
from tests.triton.compiling.meta_tensors import TOKENS, bf16, f32, i32

PROCESSORS = 132
ROWS, BLOCKS, SLOTS = 256, 10_000, 512
QUERIES = 5
"""Query tokens of a decode row that verifies drafts."""
WORDS = 9
"""Words of a slot's parameters."""
SKINNY_ROWS = (1, 8, 16)
STREAMED_ROWS = (64,)
GATED_ROWS = (64, 256)


@dataclass(frozen=True)
class Model:
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    inner: int
    normed: bool = False
    """Whether heads have norms of queries and keys."""


MODELS = {
    "Qwen3-0.6B": Model(1024, 16, 8, 128, 3072, normed=True),
    "Llama-3.1-8B": Model(4096, 32, 8, 128, 14336),
    "Qwen2.5-0.5B": Model(896, 14, 2, 64, 4864),
    "Gemma-like": Model(2304, 8, 4, 256, 9216),
    "Gemma-4-like": Model(2816, 16, 2, 512, 2112, normed=True),
    "Phi-like": Model(2560, 20, 4, 80, 10240),
}


@contextmanager
def compiling(capability: int) -> Iterator[list[Any]]:
    """Make launches compile for this capability, side by side.

    The yielded list grows by the compiled kernels.
    """
    compile_for(Gpu(capability, PROCESSORS))
    compiled: list[Any] = []
    with ThreadPoolExecutor(os.cpu_count() or 1) as threads, compiling_only(threads):
        run = JITFunction.run

        def collect(self: Any, *args: Any, **kwargs: Any) -> None:
            compiled.append(run(self, *args, **kwargs))

        JITFunction.run = collect
        yield compiled


def launch_common(model: Model, page: int, window: int) -> None:
    """Launch the kernels that are much the same for every model."""
    x, weight = bf16(TOKENS, model.hidden), bf16(model.hidden)
    rms_norm_triton.rms_norm(x, weight, 1e-6)
    silu_mul_triton.silu_mul(bf16(TOKENS, 2 * model.inner))
    sigmoid_mul_triton.sigmoid_mul(bf16(TOKENS, model.inner), bf16(TOKENS, model.inner))
    block_copy_triton.copy_blocks(
        i32(28, BLOCKS, model.kv_heads * page * model.dim), i32(5), i32(5)
    )
    for queries in (1, QUERIES):
        mask_logits_triton.mask_logits(
            bf16(ROWS * queries, 128_256), i32(10_000), i32(2), i32(ROWS * queries), queries
        )
    for logits in (bf16(ROWS, 151_936), f32(ROWS, 151_936)):
        token_masks_triton.mask_tokens(logits, i32(ROWS), i32(1024, 4748))
    progress = i32(SLOTS, 7)
    taken = sampling_triton.Taken(progress[:, 1], progress[:, 0], i32(8, ROWS))
    # Special rows are sampled from float32, and advance later.
    for logits, out in ((bf16(ROWS, 151_936), taken), (f32(ROWS, 151_936), i32(ROWS))):
        sampling_triton.sample_tokens(
            logits,
            header=i32(16),
            slots=i32(ROWS),
            seq_lens=i32(ROWS),
            samples=i32(ROWS),
            parameters=i32(SLOTS, WORDS),
            words=sampling_triton.SamplingWords(0, 3, 1, 2, 6, 4),
            scratch=i32(sampling_triton.scratch_size(ROWS, 151_936)),
            out=out,
            pdl=launch.has_pdl(torch.device("meta")),
        )
    tables = prepare_step_triton.SlotTables(
        i32(1, SLOTS, 600), i32(SLOTS, WORDS), progress, i32(SLOTS, 40_960), max_total=7
    )
    for queries in (1, QUERIES):
        inputs = prepare_step_triton.StepInputs(
            *(i32(TOKENS), i32(TOKENS), i32(1, TOKENS)),
            *(i32(*size) for size in [(ROWS,)] * 5 + [(ROWS * queries,)] * 3),
        )
        layout = prepare_step_triton.StepLayout(ROWS, TOKENS)
        prepare_step_triton.prepare_step(i32(100_000), layout, tables, inputs, page, queries)
    launch_speculation(4)


def launch_speculation(limit: int) -> None:
    """Launch the kernels of slots that have up to `limit` drafts."""
    progress, parameters = i32(SLOTS, 3 + limit), i32(SLOTS, WORDS)
    width, rows = 1 + limit, i32(ROWS)
    tables = DraftTables(
        last_sampled=progress[:, 1],
        num_computed=progress[:, 0],
        drafts=progress[:, 3:],
        num_drafts=progress[:, 2],
        tokens=i32(SLOTS, 40_960),
        draft_limit=parameters[:, 8],
        max_total=parameters[:, 7],
    )
    accept_triton.accept(
        i32(ROWS * width),
        header=i32(16),
        valid=rows,
        slots=rows,
        starts=rows,
        marks=rows,
        tables=tables,
        out=AcceptedTokens(i32(8, ROWS * width), *(i32(8, ROWS) for _ in range(4))),
    )
    ngram_triton.look_up_drafts(
        header=i32(16),
        slots=rows,
        marks=rows,
        tables=tables,
        scratch=torch.empty(SLOTS, dtype=torch.int64, device="meta"),
        min_match=2,
        max_match=4,
    )


def launch_sums(model: Model, page: int, window: int) -> None:
    """Launch sums over as many ranks as one host has, and over an odd number of ranks."""
    norm = RmsNorm(bf16(model.hidden), 1e-6)
    counters = torch.empty(peer_memory_triton.NUM_COUNTERS, dtype=torch.int64, device="meta")
    kinds: tuple[tuple[int, all_reduce_triton.Kind], ...] = (
        (8, "one_shot"),
        (8, "two_shot"),
        (3, "one_shot"),
        (2, "pushed"),
        (3, "pushed"),
        (8, "pushed"),
    )
    for ranks, kind in kinds:
        memory = peer_memory_triton.PeerMemory(
            1,
            tuple((i + 1) << 40 for i in range(ranks)),
            bf16(1),
            counters,
            1 << 24,
            peer_memory_triton.MAX_PROGRAMS,
        )
        rows = 4 if kind == "pushed" else ROWS
        all_reduce_triton.sum_parts(
            memory,
            1,
            bf16(rows, model.hidden),
            norm,
            all_reduce_triton.SumConfig(kind, 64),
            add=ranks != 3,
        )


def launch_attention(model: Model, page: int, window: int) -> None:
    norms = (bf16(model.dim), bf16(model.dim)) if model.normed else None
    qkv_rope_triton.qkv_rope(
        bf16(TOKENS, (model.heads + 2 * model.kv_heads) * model.dim),
        i32(TOKENS),
        i32(TOKENS),
        Rope(f32(40_000, model.dim // 2), f32(40_000, model.dim // 2), norms, 1e-6),
        bf16(BLOCKS, 2 * model.kv_heads, page, model.dim),
        model.heads,
    )
    q = bf16(TOKENS, (model.heads + 2 * model.kv_heads) * model.dim)
    cache = bf16(BLOCKS, 2 * model.kv_heads, page, model.dim)
    out = bf16(TOKENS, model.heads * model.dim)
    tables, rows, starts = i32(SLOTS, 600), i32(ROWS), i32(ROWS + 1)
    decode = decode_config.decode_config(model.dim, 2, model.heads)
    prefill = prefill_attention_triton.prefill_config(model.dim, 2)
    scratch = DecodeScratch(model.heads, model.kv_heads, model.dim, ROWS, q.device, decode, QUERIES)
    attention_plan_triton.plan_attention(
        rows,
        starts,
        i32(16),
        rows,
        rows,
        tile=decode.tile,
        tokens=prefill.tokens(model.heads // model.kv_heads),
        window=window,
        queries=QUERIES,
    )
    rope = Rope(f32(40_000, model.dim // 2), f32(40_000, model.dim // 2), norms, 1e-6)
    plain, bounded = (None, None), (50.0, f32(model.heads))
    for given, queries, valid_lens, (softcap, sinks) in (
        (rope, 1, None, plain),
        (rope, 1, None, bounded),
        (None, 1, None, plain),
        (None, QUERIES, rows, plain),
        (None, QUERIES, rows, bounded),
    ):
        if queries > 1 and model.dim > 256:
            continue  # a GPU refuses drafts there
        decode_attention_triton.decode_attention(
            q,
            cache,
            tables,
            rows,
            rows,
            rows,
            out,
            scratch,
            num_heads=model.heads,
            window=window,
            scale=0.1,
            softcap=softcap,
            sinks=sinks,
            rope=given,
            queries=queries,
            valid_lens=valid_lens,
        )
    launch_few(model, q, cache, rope, window)
    launch_prompts(model, q, cache, tables, window)


def launch_prompts(model: Model, q: Tensor, cache: Tensor, tables: Tensor, window: int) -> None:
    """Launch the attention of prompts."""
    rows, starts = i32(ROWS), i32(ROWS + 1)
    for softcap, sinks in ((None, None), (50.0, f32(model.heads))):
        prefill_attention_triton.prefill_attention(
            q,
            cache,
            tables,
            rows,
            rows,
            starts,
            rows,
            bf16(TOKENS, model.heads * model.dim),
            prefill_attention_triton.prefill_config(model.dim, 2),
            num_heads=model.heads,
            max_tokens=TOKENS,
            max_rows=ROWS,
            window=window,
            scale=0.1,
            softcap=softcap,
            sinks=sinks,
        )


def launch_recurrent(model: Model, page: int, window: int) -> None:
    """Launch the gated delta net of Qwen3-Next: steps of decode rows, and with prompts."""
    keys, values, dim = 16, 32, 128
    width = (2 * keys + values) * dim
    whole, weights = bf16(TOKENS, width + values * (dim + 2)), f32(values)
    projected = Projected(
        whole[:, :width], whole[:, width : width + values * dim], whole[:, -2 * values :]
    )
    delta = DeltaWeights(bf16(width, 4), weights, weights, bf16(dim), 1e-6)
    conv_state, state = bf16(SLOTS, width, 3), f32(SLOTS, values, dim, dim)
    for long_rows, drafts in ((0, 0), (0, QUERIES - 1), (4, 0)):
        rows = StateRows(
            query_starts=i32(ROWS + 1),
            state_in=i32(ROWS),
            state_out=i32(ROWS),
            settled=i32(ROWS),
            save_starts=i32(ROWS + 1),
            save_offsets=i32(2 * ROWS),
            save_rows=i32(2 * ROWS),
            max_long_tokens=TOKENS if long_rows else 0,
            max_long_rows=long_rows,
            max_drafts=drafts,
        )
        delta_net_triton.delta_net(projected, delta, conv_state, state, rows, 1e-6)
    begin_states_triton.begin_states(
        i32(ROWS),
        rows.state_in,
        header=i32(16),
        slots=i32(ROWS),
        starts=i32(ROWS),
        settled=rows.settled,
        num_computed=i32(SLOTS, 7)[:, 0],
        settled_at=i32(SLOTS),
        width=QUERIES,
    )


ConfigOf = Callable[[int, int, bool], own_linear.Config]


def launch_own_products(model: Model, rows: int, config_of: ConfigOf) -> None:
    """Launch the products of a layer, and of matrices with one output."""

    def product(
        x: Tensor | Stream, weight: Tensor, bias: Tensor | None = None, gated: bool = False
    ) -> None:
        config = config_of(weight.shape[0] // (1 + gated), weight.shape[1], gated)
        own_linear.own_linear(x, weight, bias, gated=gated, config=config)

    def add(
        hidden: Tensor, x: Tensor, weight: Tensor, norm: RmsNorm | None = None
    ) -> BegunNorm | None:
        outputs, inner = weight.shape
        config = config_of(outputs, inner, False)
        return own_linear.add_own_linear(hidden, x, weight, norm=norm, config=config)

    qkv, attended = (model.heads + 2 * model.kv_heads) * model.dim, model.heads * model.dim
    hidden, norm = bf16(rows, model.hidden), RmsNorm(bf16(model.hidden), 1e-6)
    product(hidden, bf16(qkv, model.hidden), bf16(qkv))
    begun = add(hidden, bf16(rows, attended), bf16(model.hidden, attended), norm)
    product(Stream(hidden, norm, begun), bf16(2 * model.inner, model.hidden), gated=True)
    begun = add(hidden, bf16(rows, model.inner), bf16(model.hidden, model.inner), norm)
    product(Stream(hidden, norm, begun), bf16(qkv, model.hidden))
    add(hidden, bf16(rows, model.inner), bf16(model.hidden, model.inner))
    # The compiler knows a size of one when it compiles.
    product(hidden, bf16(1, model.hidden), bf16(1))
    product(hidden, bf16(2, model.hidden), gated=True)
    add(bf16(rows, 1), bf16(rows, model.inner), bf16(1, model.inner), RmsNorm(bf16(1), 1e-6))


def launch_products(model: Model, page: int, window: int) -> None:
    for rows in SKINNY_ROWS:
        launch_own_products(
            model,
            rows,
            skinny_linear_triton.gemv_config if rows == 1 else skinny_linear_triton.skinny_config,
        )
    device = torch.device("meta")
    for rows in STREAMED_ROWS if is_hopper(device) else ():
        launch_own_products(model, rows, functools.partial(streamed_config.config, rows))
    for rows in GATED_ROWS if launch.has_pdl(device) else ():  # as the model chooses it
        gated_gemm_triton.gated_gemm(bf16(rows, model.hidden), bf16(2 * model.inner, model.hidden))


def launch_coded_products(forms: Iterable[Form], model: Model, page: int, window: int) -> None:
    """Launch the products of coded matrices of these forms."""
    qkv, attended = (model.heads + 2 * model.kv_heads) * model.dim, model.heads * model.dim
    launch_quantized((model.hidden, attended, qkv, model.inner), forms)


def disassembler() -> Path | None:
    """Return the path of a disassembler; on some platforms Triton's package has none."""
    found = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return found if found.exists() else None


def usage_of(kernel: Any) -> dict[str, int]:
    """Return registers and bytes of stack of each thread; empty where no tool reports them."""
    program = disassembler()
    if program is None:
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        said = subprocess.run(
            [program, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {name.lower(): int(count) for name, count in re.findall(r"\b(REG|STACK):(\d+)", said)}


def meetings_of(ptx: str) -> dict[str, int]:
    """Return the numbers of instructions with which GPUs meet.

    They are flags that are written and read for other GPUs to see, barriers beside them, and reads
    of 16 bytes.
    """
    return {
        "releases": len(
            re.findall(r"\batom\S*\.sys\S*\.release\.|\batom\S*\.release\S*\.sys\.", ptx)
        ),
        "acquires": len(
            re.findall(r"\batom\S*\.sys\S*\.acquire\.|\batom\S*\.acquire\S*\.sys\.", ptx)
        ),
        "barriers": ptx.count("bar.sync"),
        "wide_loads": len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)),
        "pushes": len(re.findall(r"st\.global\.wt\.v2\.b64", ptx)),
        "polls": len(re.findall(r"ld\.volatile\.global\.v2\.b64", ptx)),
    }


def describe(kernel: Any) -> dict[str, Any]:
    """Describe a compiled kernel.

    shared: bytes of a program. wgmma: instructions of the tensor cores that only Hopper has.
    """
    kernel = kernel.result() if hasattr(kernel, "result") else kernel
    return {
        "kernel": kernel.metadata.name,
        "shared": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
        "wgmma": kernel.asm["ptx"].count("wgmma.mma_async"),
        **meetings_of(kernel.asm["ptx"]),
        **usage_of(kernel),
    }


GROUPS: dict[str, Callable[[Model, int, int], None]] = {
    "common": launch_common,
    "sums": launch_sums,
    "attention": launch_attention,
    "products": launch_products,
    "experts": launch_experts,
    "quantized": functools.partial(launch_coded_products, MAIN_FORMS),
    "all-quantized": functools.partial(launch_coded_products, FORMS),
    "recurrent": launch_recurrent,
    "codes": launch_codes,
}


def main(capability: int, model: Model, page: int, window: int, groups: list[str]) -> None:
    with compiling(capability) as compiled:
        for group in groups:
            GROUPS[group](model, page, window)
    for kernel in compiled:
        print(json.dumps(describe(kernel)))


if __name__ == "__main__":
    main(int(sys.argv[1]), MODELS[sys.argv[2]], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
