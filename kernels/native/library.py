"""Kernels in C for a CPU, which the machine's own compiler builds when they are first needed.

A library is built once and kept in a folder that `keep_in` names. Its name is a digest of whatever
it depends on, so a new version, compiler or CPU gets a library of its own.

Kernels share torch's OpenMP threads: two pools of threads would wait for one another's cores. So
the library must find the OpenMP that torch has loaded, which is GCC's.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_FLAGS = ("-O3", "-std=gnu11", "-fopenmp", "-fPIC", "-shared", "--param=avoid-fma-max-bits=0")
"""Tuned for AMD's Zen, GCC keeps multiplications and additions apart in some sums and joins them in
others of the same code, so rows would differ by how many are computed together. The last option
joins them wherever it can."""
_TUNED = ("-march=native", "-mcpu=native")
"""The options that name this machine's CPU; compilers know one or the other."""
_TIMEOUT_S = 120.0


_folder: Path | None = None
_failed: dict[tuple[Path | None, str, tuple[str, ...]], str] = {}
"""Why libraries could not be built, by their folder, file and definitions. A CPU may lack
instructions for one that each of thousands of matrices asks for, and a compiler takes a second to
say so."""


class NoLibraryError(Exception):
    """Says why there is no library of kernels in C."""


def keep_in(cache: Path | None) -> None:
    """Keep libraries in a folder of a cache; None for no libraries."""
    global _folder
    _folder = None if cache is None else cache / "native"


@functools.cache
def load(source: str, *definitions: str) -> ctypes.CDLL:
    """Return the library of a file in `source`, built with definitions of the preprocessor.

    Raises NoLibraryError.
    """
    asked = _folder, source, definitions
    if asked in _failed:
        raise NoLibraryError(_failed[asked])
    file = Path(__file__).parent / "source" / source
    if not _torch_has_gcc_threads():
        raise NoLibraryError("torch has other threads than those of GCC's OpenMP")
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise NoLibraryError("there is no C compiler (gcc)")
    flags = [*_FLAGS, *(f"-D{name}" for name in definitions)]
    if _folder is None:
        raise NoLibraryError("there is no folder for libraries")
    library = _folder / f"{file.stem}-{_digest(file, compiler, flags)}.so"
    try:
        if not library.exists():
            _build(file, compiler, flags, library)
        return ctypes.CDLL(str(library))
    except NoLibraryError as error:
        _failed[asked] = str(error)
        raise
    except OSError as error:
        raise NoLibraryError(f"{source} cannot be built or loaded: {error}") from error


def library_of(source: str, dtype: torch.dtype, *definitions: str) -> ctypes.CDLL:
    """Return the library of a file for numbers of a type, float32 or bfloat16.

    definitions: others of the preprocessor. Raises NoLibraryError.
    """
    library = load(source, *definitions, *(("BFLOAT16",) if dtype.itemsize == 2 else ()))
    load("tape.c")  # calls the kernels of all others
    return library


def address(library: ctypes.CDLL, name: str) -> int:
    """Return the address of a kernel (see tape.py)."""
    found = ctypes.cast(library[name], ctypes.c_void_p).value
    assert found is not None
    return found


def _torch_has_gcc_threads() -> bool:
    """Return whether GCC's OpenMP is in this process."""
    try:
        return "libgomp" in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def _digest(file: Path, compiler: str, flags: list[str]) -> str:
    """Return a digest of whatever the library depends on."""
    real = Path(compiler).resolve()
    parts = [repr((flags, _TUNED, str(real), real.stat().st_mtime_ns)), _cpu()]
    found = hashlib.sha256("\n".join(parts).encode())
    for read in (file, *sorted(file.parent.glob("*.h"))):
        found.update(read.read_bytes())
    return found.hexdigest()[:20]


def _cpu() -> str:
    """Return the CPU's model and instructions: one home folder may serve several machines."""
    names = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "Features")
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    found = [line for line in lines if line.split("\t")[0].split(":")[0].strip() in names]
    return "\n".join([platform.machine(), *found])


def _build(file: Path, compiler: str, flags: list[str], library: Path) -> None:
    """Build a library. Raises OSError or NoLibraryError."""
    library.parent.mkdir(parents=True, exist_ok=True)
    # Another process may build the same library: whoever ends last replaces it by an equal one.
    made = library.with_suffix(f".{os.getpid()}")
    reason = ""
    try:
        for tuned in _TUNED:
            run = subprocess.run(
                [compiler, *flags, tuned, str(file), "-o", str(made), "-lm"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TIMEOUT_S,
            )
            if run.returncode == 0:
                made.replace(library)
                return
            reason = reason or (run.stderr.strip() or "no message").splitlines()[0]
    except subprocess.TimeoutExpired:
        reason = f"it takes longer than {_TIMEOUT_S:.0f} s"
    finally:
        made.unlink(missing_ok=True)
    raise NoLibraryError(f"{compiler} cannot build {file.name}: {reason}")
