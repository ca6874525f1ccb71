"""Decode attention on the threads of a CPU, in random order."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sidestep.kernels.attention.hopper.decode_hopper import _THREADS, Form
from sidestep.kernels.cuda import compiler
from tests.triton.cuda_on_threads.building import compiled, with_bodies, with_shared_memory

BODIES = {
    "load_matrices": "load_squares(words, address, false);",
    "load_transposed": "load_squares(words, address, true);",
    "multiply": "multiply_squares(sum, x, w);",
    "place_of_launch": "return 0;",
    "give_word": "memcpy(place, &word, 4);",
    "give_words": "memcpy(place, &words, 16);",
    "words_now": "wait_in_vain(); return *reinterpret_cast<const uint4*>(place);",
    "power_of_2": "return exp2f(x);",
}
"""Bodies of functions that have instructions of a GPU."""
LAUNCH = """
static void** own;
template <class Value>
static Value& argument(int i) { return *static_cast<Value*>(own[i]); }
static void run_thread() {
    decode_attention(
        argument<const u16*>(0), argument<u16*>(1), argument<Rows>(2), argument<Turning>(3),
        argument<const float*>(4), argument<char*>(5), argument<u16*>(6), argument<Sizes>(7));
    alive--;
    sleep_here();
}
extern "C" bool launch(void** arguments, int blocks, int threads, int shared, int seed, int haste) {
    own = arguments;
    return run_threads(run_thread, blocks, threads, shared, seed, haste);
}
"""


class Emulated:
    """A form of the kernel that runs on a CPU, where a Kernel runs on a GPU."""

    def __init__(self, form: Form, folder: Path) -> None:
        """Compile the form in a folder."""
        self.seed, self.haste = 0, 0
        """How threads and copies are ordered; see threads.hpp."""
        self._shared = form.shared
        for name in ("exchange.cuh", "softmax.cuh", "place.cuh", "turned_heads.cuh"):
            text = (compiler._INCLUDE / name).read_text()
            (folder / name).write_text(with_bodies(text, BODIES))
        text = (compiler._SOURCE / "decode_attention.cu").read_text()
        kernel = with_shared_memory(with_bodies(text, BODIES))
        source = f'#include "numbers.cuh"\n#include "place.cuh"\n{kernel}{LAUNCH}'
        self._library = compiled(folder, source, form.options)

    def launch(self, blocks: int, arguments: Sequence[Any]) -> None:
        """Run the kernel."""
        places = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        how = blocks, _THREADS, self._shared, self.seed, self.haste
        assert self._library.launch(places, *how), "threads wait for ever, or said what is wrong"
