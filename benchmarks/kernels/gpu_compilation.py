"""Compilation of all kernels that gpu_kernels.py --tune will launch, spread over processes.

One process alone would take most of the run.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator

import torch
from triton.runtime.errors import OutOfResources

from benchmarks.kernels.gpu_attention import Decode, Prefill
from benchmarks.kernels.gpu_configs import (
    GATED_ROWS,
    SEVERAL_QUERIES,
    TUNED_ROWS,
    decode_configs,
    gated_configs,
    layer_configs,
    prefill_configs,
    product_configs,
)
from benchmarks.kernels.gpu_layers import Layers
from benchmarks.kernels.gpu_models import MODELS, Model
from benchmarks.kernels.gpu_products import check_linear
from benchmarks.kernels.gpu_timing import DEVICE, DTYPE, Call
from sidestep.kernels.compiling import CompilerThreads, compiling_only
from sidestep.kernels.products.gated.gated_gemm_triton import GatedConfig, gated_gemm


def compile_gated(model: Model, rows: int, config: GatedConfig) -> None:
    """Compile a gated product without running it."""
    x, weight = (
        torch.empty(n, model.hidden, dtype=DTYPE, device=DEVICE) for n in (rows, 2 * model.inner)
    )
    with CompilerThreads(1) as threads, compiling_only(threads):
        gated_gemm(x, weight, config=config)


@functools.lru_cache
def _one_layer(model: Model, rows: int) -> Layers:
    return Layers(dataclasses.replace(model, kept=1), rows, 65)


def _compilations(sections: set[str]) -> Iterator[Call]:
    """Yield a call for each kernel that --tune will launch."""
    for model in MODELS:
        if "decode" in sections and model is MODELS[0]:
            for config, rows, queries in itertools.product(
                decode_configs(), (1, 8, 64, 256), (1, SEVERAL_QUERIES)
            ):
                yield lambda m=model, c=config, r=rows, q=queries: Decode(
                    m, [65] * r, copies=1, queries=q
                ).calls(c)[0]()
        if "prefill" in sections:
            for tiles in prefill_configs():
                for lengths in ([8192], [512] * 16):
                    yield lambda m=model, c=tiles, n=lengths: Prefill(m, n).calls(c)[0]()
        # The first number of rows has the kernels of the second.
        for rows in GATED_ROWS[1:] if "gated" in sections else ():
            for gated in gated_configs(rows):
                yield lambda m=model, r=rows, c=gated: compile_gated(m, r, c)
        for rows in TUNED_ROWS if "layers" in sections else ():
            for config in decode_configs():
                yield lambda m=model, r=rows, c=config: (
                    _one_layer(m, r).set_decode(c),
                    _one_layer(m, r).run({}),
                )
            for configs in layer_configs(model, rows):
                yield lambda m=model, r=rows, c=configs: _one_layer(m, r).run(c)
            for product in product_configs((model.vocab, model.hidden, False), rows):
                yield lambda m=model, r=rows, c=product: check_linear(
                    m.vocab, m.hidden, False, r, c
                )


def _compile(index: int, of: int, sections: set[str]) -> None:
    torch.cuda.set_device(0)
    for call in itertools.islice(_compilations(sections), index, None, of):
        try:
            call()
        except (OutOfResources, RuntimeError) as error:
            print(f"  {type(error).__name__}: {str(error)[:120]}")


def compile_all(sections: set[str]) -> None:
    """Fill Triton's cache from several processes."""
    in_processes(_compile, sections)


def in_processes(share: Callable[..., None], *arguments: object) -> None:
    """Call `share` with its index, the number of processes, and the arguments, in each process."""
    begin, number = time.perf_counter(), max(1, (os.cpu_count() or 2) - 1)
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=share, args=(i, number, *arguments)) for i in range(number)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)
