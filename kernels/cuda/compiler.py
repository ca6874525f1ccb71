"""Kernels in CUDA C++, compiled by the library that comes with torch (NVRTC).

They are for what Triton has no words for: clusters of processors, loads for several of them at
once, and warps with tasks and registers of their own. A kernel takes a third of a second, and is
kept on disk, where all processes find it.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triton import knobs

_logger = logging.getLogger(__name__)
_SOURCE, _INCLUDE = (Path(__file__).parent / folder for folder in ("source", "include"))
_OPTIONS = ("--std=c++17", "--gpu-architecture=sm_90a")
"""Instructions of Hopper alone need the letter."""


class CudaCompileError(RuntimeError):
    """The library refuses a kernel; its message is the compiler's."""


@functools.cache
def compiles() -> bool:
    """Return whether this machine has the library."""
    try:
        from cuda.bindings import nvrtc

        return int(nvrtc.nvrtcVersion()[0]) == 0
    except (ImportError, RuntimeError, OSError):
        return False


def cubin(name: str, defines: Mapping[str, int | str], headers: Mapping[str, str]) -> Path:
    """Return the file of source/`name`.cu's machine code, which is compiled if it is not there.

    headers: name -> text of files it includes, beside those of include/. Raises
    CudaCompileError.
    """
    from cuda.bindings import nvrtc

    source = (_SOURCE / f"{name}.cu").read_text()
    files = sorted(_INCLUDE.rglob("*.cuh"))
    included = {str(path.relative_to(_INCLUDE)): path.read_text() for path in files} | dict(headers)
    options = [*_OPTIONS, *(f"-D{key}={value}" for key, value in defines.items())]
    version = nvrtc.nvrtcVersion()[1:]
    key = hashlib.sha256(repr((source, included, options, version)).encode()).hexdigest()
    kept = Path(knobs.cache.dir) / "cuda" / f"{name}-{key[:32]}.cubin"
    if kept.exists():
        return kept
    made, said = _compile(name, source, included, options)
    _logger.debug("%s", said)
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as file:
        file.write(made)
    os.replace(file.name, kept)
    return kept


def _compile(
    name: str, source: str, included: dict[str, str], options: list[str]
) -> tuple[bytes, str]:
    """Return the machine code, and what the compiler says."""
    from cuda.bindings import nvrtc

    texts = [text.encode() for text in included.values()]
    names = [key.encode() for key in included]
    error, program = nvrtc.nvrtcCreateProgram(
        source.encode(), f"{name}.cu".encode(), len(texts), texts, names
    )
    _check(error)
    try:
        given = [option.encode() for option in options]
        (failed,) = nvrtc.nvrtcCompileProgram(program, len(given), given)
        error, size = nvrtc.nvrtcGetProgramLogSize(program)
        _check(error)
        # The library writes into what it is given, so that is never `bytes`: Python has one object
        # for each single byte, and all that reads a space would find a zero from then on.
        said = bytearray(size)
        _check(*nvrtc.nvrtcGetProgramLog(program, said))
        text = said.rstrip(b"\0").decode(errors="replace")
        if int(failed):
            raise CudaCompileError(f"{name}.cu with {options}: {text}")
        error, size = nvrtc.nvrtcGetCUBINSize(program)
        _check(error)
        made = bytearray(size)
        _check(*nvrtc.nvrtcGetCUBIN(program, made))
        return bytes(made), text
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _check(error: Any) -> None:
    if int(error):
        raise CudaCompileError(str(error))
