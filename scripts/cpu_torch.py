"""Print pip's arguments for torch's CPU build, on one line, or nothing.

The output is empty where pip's own choice is right. From PyPI, torch on Linux brings several
gigabytes of CUDA's libraries, which a machine without an NVIDIA GPU cannot use.
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

INDEX = "https://download.pytorch.org/whl/cpu"
PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
TIMEOUT_S = 5.0
"""Seconds to wait for the index: behind many firewalls it never answers."""


def pip_arguments(index: str = INDEX) -> list[str]:
    """Return the arguments of `pip install`, or none where pip's own choice is right.

    There are none where torch is installed, where there is a GPU, on systems whose torch has no
    CUDA, and where the index cannot be reached.
    """
    if (
        importlib.util.find_spec("torch")
        or platform.system() != "Linux"
        or has_gpu()
        or not is_reachable(index)
    ):
        return []
    return ["--index-url", index, torch_requirement()]


def has_gpu() -> bool:
    """Return whether the machine has an NVIDIA GPU with its driver."""
    command = shutil.which("nvidia-smi")
    return Path("/proc/driver/nvidia/version").exists() or (
        command is not None and subprocess.run([command, "-L"], capture_output=True).returncode == 0
    )


def is_reachable(index: str) -> bool:
    """Return whether an index has torch."""
    try:
        with urllib.request.urlopen(f"{index}/torch/", timeout=TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def torch_requirement() -> str:
    """Return the project's own requirement."""
    requirements: list[str] = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
    return next(text for text in requirements if text.startswith("torch>"))


if __name__ == "__main__":
    print(*pip_arguments())
