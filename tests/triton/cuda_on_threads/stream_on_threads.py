"""The stream of experts' matrices on the threads of a CPU, in random order."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from sidestep.kernels.cuda import compiler
from sidestep.kernels.experts.common.sorted_pairs import SortedPairs
from sidestep.kernels.experts.streamed_pairs import _THREADS, Form, _Operands, _Sizes
from tests.triton.cuda_on_threads.building import compiled, with_bodies, with_shared_memory

BODIES = {
    "acquired": "wait_in_vain(); return *static_cast<const volatile int*>(place);",
    "tell": """
        if (threadIdx.x < 128) named_sync<128>(1);
        else named_sync<128>(2);
        if (threadIdx.x % 128 == 0) ++*place;""",
}
"""Bodies of functions that have instructions of a GPU."""
LAUNCH = """
static const TileMap *own_gate_up, *own_down;
static const Operands* own_operands;
static const Sizes* own_sizes;
static void run_thread() {
    expert_stream(*own_gate_up, *own_down, *own_operands, *own_sizes);
    alive--;
    sleep_here();
}
extern "C" bool launch(
    const TileMap* gate_up, const TileMap* down, const Operands* operands, const Sizes* sizes,
    int blocks, int threads, int shared, int seed, int haste) {
    own_gate_up = gate_up, own_down = down, own_operands = operands, own_sizes = sizes;
    products.clear(), warpgroups.clear();
    return run_threads(run_thread, blocks, threads, shared, seed, haste);
}
"""


class _TileMap(ctypes.Structure):
    _fields_ = (
        ("first", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("rows", "row_bytes", "box")),
    )


def build(form: Form, folder: Path) -> ctypes.CDLL:
    """Compile a form of the kernel for the CPU, in a folder."""
    for name in ("expert_results.cuh", "activations.cuh", "place.cuh"):
        (folder / name).write_text((compiler._INCLUDE / name).read_text())
    kernel = with_bodies((compiler._SOURCE / "expert_stream.cu").read_text(), BODIES)
    return compiled(folder, with_shared_memory(kernel) + LAUNCH, form.options)


def multiply(
    library: ctypes.CDLL,
    form: Form,
    x: Tensor,
    pairs: SortedPairs,
    gate_up: Tensor,
    down: Tensor,
    biases: tuple[Tensor, Tensor] | None,
    *,
    blocks: int,
    seed: int,
    haste: int,
) -> Tensor:
    """Return the results of all pairs, [T * k, D]; what is not written is NaN.

    gate_up [E, 2 F, D], down [E, D, F]. seed, haste: as in threads.hpp.
    """
    experts, width, inner_width = down.shape
    inner = torch.full((len(pairs.order), inner_width), torch.nan, dtype=x.dtype)
    results = torch.full((len(x) * form.chosen, width), torch.nan, dtype=x.dtype)
    pairs = pairs._replace(progress=pairs.progress.clone())
    given = (x, *(biases or (None, None)), *pairs, inner, results)
    arguments = (
        *(_map_of(matrix) for matrix in (gate_up, down)),
        _Operands(*(None if one is None else one.data_ptr() for one in given)),
        _Sizes(len(results), width, inner_width, experts),
    )
    places = map(ctypes.byref, arguments)
    ended = library.launch(*places, blocks, _THREADS, form.shared, seed, haste)
    assert ended, "threads wait for ever, or said what is wrong"
    return results


def _map_of(matrix: Tensor) -> _TileMap:
    rows = matrix.shape[0] * matrix.shape[1]
    return _TileMap(matrix.data_ptr(), rows, matrix.shape[2] * matrix.itemsize, 64)
