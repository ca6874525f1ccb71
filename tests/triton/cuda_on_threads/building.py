"""Kernels in CUDA C++ as C++ for a CPU, and their compilation.

A kernel is compiled as it is. Stand-ins take the place of the included files that name Hopper's
instructions, and of the functions in others that do.
"""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).parent


def runs_here() -> bool:
    """Return whether this machine compiles C++ and has the processor that threads.hpp is for."""
    return shutil.which("g++") is not None and platform.machine() == "x86_64"


def with_bodies(source: str, bodies: Mapping[str, str]) -> str:
    """Return a source in which these functions have other bodies, which name no instruction."""
    for name, body in bodies.items():
        pattern = rf"(__forceinline__ \w+ {name}\([^)]*(?:\)[^)]*)*?\) {{\n).*?\n}}\n"
        source = re.sub(pattern, rf"\g<1>{body}\n}}\n", source, flags=re.DOTALL)
    assert "asm" not in source, "a function needs a stand-in"
    return source


def with_shared_memory(source: str) -> str:
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


def compiled(folder: Path, source: str, options: Mapping[str, int | str]) -> ctypes.CDLL:
    """Return the library of a source, beside the stand-ins and what else it includes."""
    for path in (*FOLDER.glob("*.cuh"), FOLDER / "threads.hpp"):
        if not (folder / path.name).exists():
            shutil.copy(path, folder)
    (folder / "kernel.cpp").write_text(source)
    defines = [f"-D{name}={value}" for name, value in options.items()]
    command = ["g++", "-std=c++17", "-O1", "-w", "-fpermissive", "-ffp-contract=off", "-shared"]
    made = folder / "kernel.so"
    subprocess.run(
        [*command, "-fPIC", *defines, "-I", folder, "-o", made, folder / "kernel.cpp"],
        check=True,
        timeout=300,
    )
    library = ctypes.CDLL(str(made))
    library.launch.restype = ctypes.c_bool
    return library
