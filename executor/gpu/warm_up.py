"""Launch whatever any step may need, so that it is compiled and loaded before the first step.

The process that compiles kernels ahead (executor/processes/kernel_compiler.py) does so too, without
a GPU. A worker first waits until that process has ended.
"""

from __future__ import annotations

import os
import select

import numpy as np
import torch

from sidestep.executor.gpu.cuda_graphs import PAD, StepSizes, draft_sizes
from sidestep.executor.gpu.gpu_setup import GpuSetup, StepMemory
from sidestep.executor.gpu.step_kernels import LoadedModel, StepKernels
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.runner.runner import WorkerArgs
from sidestep.ipc.config import available_cores
from sidestep.kernels.compiling import CompilerThreads, compiling_only
from sidestep.kernels.launch_order import checked_order
from sidestep.kernels.ops.token_masks import mask_tokens

_TILED = 1024
"""Tokens up to which the number of tokens may decide on the kernels of products."""
_TIMEOUT_S = 300.0
"""Seconds that a worker waits at most before it compiles the kernels itself."""


def warm_up(setup: GpuSetup, memory: StepMemory, parallel: Parallel, kernels: StepKernels) -> None:
    """Compile all kernels, and load the products of all sizes."""
    args = setup.args
    wait_for_compiler(args.compiled)
    # The kernels that it has not compiled are compiled here, side by side.
    sharing = args.parallel.num_ranks * args.parallel.most_replicas
    num_threads = max(1, available_cores() // sharing)
    with CompilerThreads(num_threads) as threads, compiling_only(threads):
        launch_all(setup, memory, parallel, kernels)
    load_products(setup, kernels)


def load_products(setup: GpuSetup, kernels: StepKernels) -> None:
    """Run the products of all sizes that steps without a graph have."""
    kernels.model.decoder.warm_up(range(PAD, setup.limits.max_num_batched_tokens + 1, PAD))


def wait_for_compiler(compiled: int | None) -> None:
    """Wait until the process that compiles ahead has ended. compiled: see WorkerArgs."""
    if compiled is not None:
        select.select([compiled], [], [], _TIMEOUT_S)
        os.close(compiled)


@torch.inference_mode()
def launch_without_gpu(
    args: WorkerArgs, parallel: Parallel, *, device: str = "meta", num_blocks: int = 1
) -> None:
    """Launch what a runner's start compiles, on any machine, within compiling.compiling_only.

    The tensors are on a device where they stand for those on a GPU (see
    kernels.compiling.compile_for), and the cache may have any size. Raises EngineStartError where
    the runner would.
    """
    setup = GpuSetup(args, torch.device(device))
    if setup.backend.graph_safe:
        memory = StepMemory(setup)
        launch_samplers(setup, memory, parallel)  # first: they take longest to compile
        setup.open_peer_sums(parallel)
        model = LoadedModel(setup, parallel, args)
        kernels = StepKernels(setup, memory, parallel, model, num_blocks)
        launch_all(setup, memory, parallel, kernels)


def launch_all(
    setup: GpuSetup, memory: StepMemory, parallel: Parallel, kernels: StepKernels
) -> None:
    """Launch whatever any step may need."""
    limits, last = setup.limits, setup.samples
    most, tokens, model = limits.max_num_seqs, limits.max_num_batched_tokens, kernels.model
    # The kernels that take longest to compile come first: the samplers, then attention.
    kinds = [StepSizes(rows, tokens, rows, rows) for rows in {1, most}]
    kinds += [*kernels.decode_sizes(most), *draft_sizes(limits)]
    if memory.states is not None:
        kinds += [StepSizes(rows, tokens, rows, rows) for rows in memory.states.row_ladder]
        kinds.append(StepSizes(most, tokens, most, most, has_many_saves=True))
    with model.decoder.kinds_of_layers():
        launch_samplers(setup, memory, parallel)
        with checked_order():
            for sizes in kinds:
                kernels.launch(sizes, sizes.layout, empty=torch.zeros)
        # A step may have any number of prompt tokens whose logits are asked for.
        model.decoder.warm_up((1, 2, 16, 32, 64, 65), with_head=last)
        # Products of some hundred rows have tiles by their number.
        model.decoder.warm_up(range(PAD, min(_TILED, tokens) + 1, PAD))
        copied = np.zeros(1, np.int32)
        kernels.attention.copy_blocks(copied, copied)
        if kernels.recurrent is not None:
            kernels.recurrent.copy(copied, copied)
        if last:
            _launch_masks(setup, model)


def launch_samplers(setup: GpuSetup, memory: StepMemory, parallel: Parallel) -> None:
    """Launch the sampler of special rows, which are float32, and that of all other rows."""
    sampler, device = memory.sampler, setup.device
    if sampler is None:
        return
    vocab, size = setup.args.spec.vocab_size, parallel.size
    rows = memory.columns.step_rows(memory.message, memory.layout, 1, 1)
    own = torch.zeros(1, -(-vocab // size) * size, dtype=setup.dtype, device=device)
    copies = torch.zeros(1, vocab, device=device)
    column = torch.zeros(4, dtype=torch.int32, device=device)
    sampler.sample_copies(copies, column, column, column[:1], column)
    sampler.sample_plain(own[:, :vocab], rows, rows.samples)
    sampler.advance(rows, rows.valid, rows.samples)


def _launch_masks(setup: GpuSetup, model: LoadedModel) -> None:
    """Launch the masking of the model's own logits, and of those of special rows."""
    vocab, device = setup.args.spec.vocab_size, setup.device
    mark, words = (
        torch.zeros(1, n, dtype=torch.int32, device=device) for n in (4, -(-vocab // 32))
    )
    for logits in (model.logits[:1, :vocab], torch.zeros(1, vocab, device=device)):
        mask_tokens(logits, mark[0], words)
