"""The kernel for one row of coded experts on the threads of a CPU, in random order."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sidestep.kernels.cuda import compiler
from sidestep.kernels.experts.coded_row import _Factors, _Operands
from sidestep.kernels.experts.row_form import Form
from tests.triton.cuda_on_threads.building import compiled, with_bodies, with_shared_memory

BODIES = {
    "multiply_16": "multiply_tile(sum, rows, low, high);",
    "of_int4": "return added(word >> (4 * place) & 0x000F000F | 0x43004300, offset);",
    "place_of_launch": """
        const u32 before = *counter, last = 2 * gridDim.x - 1;
        *counter = before == last ? 0 : before + 1;
        return before >= u32(gridDim.x);""",
    "give_word": "memcpy(place, &word, 4);",
    "give_words": "memcpy(place, &words, 16);",
    "words_now": """
        const auto found = *reinterpret_cast<const uint4*>(place);
        for (int i = 0; i < 4; i++)
            if (word_of(found, i) == NOT_THERE) return wait_in_vain(), found;
        return found;""",
}
"""Bodies of functions that have instructions of a GPU."""
LAUNCH = """
static const Operands* own_operands;
static const Factors* own_factors;
static void run_thread() {
    expert_row(*own_operands, *own_factors);
    alive--;
    sleep_here();
}
extern "C" bool launch(
    const Operands* operands, const Factors* factors, int blocks, int shared, int seed, int haste) {
    own_operands = operands, own_factors = factors;
    return run_threads(run_thread, blocks, 32 * (WARPS + 2), shared, seed, haste);
}
"""


def build(form: Form, folder: Path) -> ctypes.CDLL:
    """Compile a form of the kernel for the CPU, in a folder."""
    include = compiler._INCLUDE
    shared = (include / name for name in ("int4.cuh", "activations.cuh", "exchange.cuh"))
    for path in (*include.glob("expert_row/*.cuh"), *shared):
        copy = folder / path.relative_to(include)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(with_bodies(path.read_text(), BODIES))
    kernel = (compiler._SOURCE / "expert_row.cu").read_text()
    return compiled(folder, with_shared_memory(kernel) + LAUNCH, form.options)


RESULTS = ("next_weighted", "next_squares", "behind_out")


@dataclass(frozen=True)
class Row:
    """A form of the kernel that is compiled, and its operands by name."""

    form: Form
    library: ctypes.CDLL
    operands: dict[str, Tensor | None]
    eps: float

    def launch(self, seed: int, haste: int, out: Tensor) -> list[Tensor]:
        """Run the kernel in an order of threads, and return RESULTS. haste: as in threads.hpp."""
        made = {}
        for name in RESULTS:
            like = self.operands[name]
            assert like is not None
            made[name] = torch.zeros_like(like)
        given = self.operands | made | {"out": out}
        tensors = (given[field[0]] for field in _Operands._fields_)
        addresses = (None if one is None else one.data_ptr() for one in tensors)
        operands, factors = _Operands(*addresses), _Factors(1.0, 2.0**-100, self.eps)
        places = ctypes.byref(operands), ctypes.byref(factors)
        blocks, shared = self.form.blocks, self.form.shared
        ended = self.library.launch(*places, blocks, shared, seed, haste)
        assert ended, "threads wait for ever, or said what is wrong"
        return list(made.values())
