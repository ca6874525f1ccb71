"""The kernel for one row of coded experts on the threads of a CPU, in random order.

The kernel is compiled for the CPU as it is. Stand-ins take the place of the included files that
name Hopper's instructions, and of the functions in others that do.
"""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sidestep.kernels.cuda import compiler
from sidestep.kernels.experts.coded_row import _Factors, _Operands
from sidestep.kernels.experts.row_form import Form

FOLDER = Path(__file__).parent
STAND_INS = ("hopper.cuh", "numbers.cuh")
BODIES = {
    "multiply_16": "multiply_tile(sum, rows, low, high);",
    "of_int4": "return added(word >> (4 * place) & 0x000F000F | 0x43004300, offset);",
    "place_of_launch": """
        const u32 before = *counter, last = 2 * gridDim.x - 1;
        *counter = before == last ? 0 : before + 1;
        return before >= u32(gridDim.x);""",
    "give_word": "memcpy(place, &word, 4);",
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


def runs_here() -> bool:
    """Return whether this machine compiles C++ and has the processor that threads.hpp is for."""
    return shutil.which("g++") is not None and platform.machine() == "x86_64"


def _with_bodies(source: str) -> str:
    """Return a source with the functions of BODIES."""
    for name, body in BODIES.items():
        pattern = rf"(__forceinline__ \w+ {name}\([^)]*(?:\)[^)]*)*?\) {{\n).*?\n}}\n"
        source = re.sub(pattern, rf"\g<1>{body}\n}}\n", source, flags=re.DOTALL)
    assert "asm" not in source, "a function needs a stand-in"
    return source


def _with_shared_memory(source: str) -> str:
    """Return a kernel's source with each variable in shared memory as one of the block."""
    source = re.sub(
        r"extern __shared__ .*? memory\[\];", "char* const memory = current->block->memory;", source
    )

    def variables(found: re.Match[str]) -> str:
        kind, names = re.sub(r"__align__\(\d+\) ", "", found[1]).split(" ", 1)
        made = []
        for part in names.split(", "):
            name, _, size = part.removesuffix("]").partition("[")
            made.append(
                f"{kind} (&{name})[{size}] = static_variable<{kind}, {size}>();"
                if size
                else f"{kind}& {name} = static_variable<{kind}, 1>()[0];"
            )
        return "    " + " ".join(made)

    return re.sub(r"    __shared__ (.*);", variables, source)


def build(form: Form, folder: Path) -> ctypes.CDLL:
    """Compile a form of the kernel for the CPU, in a folder."""
    for name in (*STAND_INS, "threads.hpp"):
        shutil.copy(FOLDER / name, folder)
    for path in compiler._INCLUDE.glob("*.cuh"):
        if path.name.startswith(("row_", "int4", "activations")) and path.stem != "row_products":
            (folder / path.name).write_text(_with_bodies(path.read_text()))
    kernel = (compiler._SOURCE / "expert_row.cu").read_text()
    (folder / "kernel.cpp").write_text(_with_shared_memory(kernel) + LAUNCH)
    options = [f"-D{name}={value}" for name, value in form.options.items()]
    command = ["g++", "-std=c++17", "-O1", "-w", "-fpermissive", "-ffp-contract=off", "-shared"]
    made = folder / "kernel.so"
    subprocess.run(
        [*command, "-fPIC", *options, "-o", made, folder / "kernel.cpp"], check=True, timeout=300
    )
    library = ctypes.CDLL(str(made))
    library.launch.restype = ctypes.c_bool
    return library


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
