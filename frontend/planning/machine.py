"""A machine's GPUs with their memory, bandwidth and links, and its cores and memory.

They are found without CUDA: by nvidia-smi, which answers in a moment and holds no GPU.
"""

from __future__ import annotations

import csv
import os
import re
import subprocess
from collections.abc import Sequence

import msgspec

from sidestep.ipc.config import available_cores, visible_gpus_of_environment

_TIMEOUT_S = 20.0
_MIB = 1 << 20

BANDWIDTHS = {
    "B200": 8000,
    "H200": 4800,
    "H20": 4000,
    "H100 NVL": 3900,
    "H100 PCIe": 2000,
    "H100": 3350,
    "A100-SXM4-40GB": 1555,
    "A100-PCIE-40GB": 1555,
    "A100 80GB PCIe": 1935,
    "A100": 2039,
    "A30": 933,
    "A10G": 600,
    "A10": 600,
    "A40": 696,
    "L40S": 864,
    "L40": 864,
    "L4": 300,
    "T4": 320,
    "V100": 900,
    "RTX 5090": 1792,
    "RTX 4090": 1008,
    "RTX 3090 Ti": 1008,
    "RTX 3090": 936,
    "RTX A6000": 768,
    "RTX 6000 Ada": 960,
}
"""Bandwidth of a GPU's memory in GB/s as its maker states it, by a part of the GPU's name.

The first part that fits a name counts.
"""


class GpuInfo(msgspec.Struct, frozen=True):
    """One GPU."""

    name: str
    memory_bytes: int
    bandwidth: float | None
    """Memory bandwidth in bytes a second as the maker states it; None for an unknown name."""


class Machine(msgspec.Struct, frozen=True):
    """One host."""

    gpus: list[GpuInfo]
    links: dict[str, int]
    """Number of GPU pairs that each kind of link connects, by nvidia-smi's name of the kind."""
    cpu_cores: int
    memory_bytes: int


def this_machine() -> Machine:
    """Return the machine that this process runs on; without nvidia-smi it has no GPUs."""
    found = _nvidia_smi("--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits")
    visible = visible_gpus_of_environment()
    gpus = {
        int(index): GpuInfo(name, int(memory) * _MIB, bandwidth_of(name))
        for index, uuid, name, memory in _rows(found)
        if visible is None or _is_among(index, uuid, visible)
    }
    links = count_links(_nvidia_smi("topo", "-m"), list(gpus)) if len(gpus) > 1 else {}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(list(gpus.values()), links, available_cores(), memory)


def gpu_indices() -> list[str]:
    """Return the indices of all GPUs, visible or not; without nvidia-smi there are none."""
    return _nvidia_smi("--query-gpu=index", "--format=csv,noheader").split()


def bandwidth_of(name: str) -> float | None:
    """Return the bandwidth of a GPU's memory in bytes a second, as its maker states it.

    None for an unknown name.
    """
    if "Laptop" in name:  # a faster GPU has the same name
        return None
    return next(
        (
            1e9 * value
            for part, value in BANDWIDTHS.items()
            if re.search(rf"\b{re.escape(part)}\b", name)
        ),
        None,
    )


def count_links(matrix: str, gpus: Sequence[int]) -> dict[str, int]:
    """Return the number of pairs of these GPUs for each kind of link in `nvidia-smi topo -m`."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", matrix).splitlines()
    counts: dict[str, int] = {}
    columns = next(
        (
            line.split()
            for line in lines
            if line.split()[:1] == ["GPU0"] and "X" not in line.split()
        ),
        [],
    )
    for line in lines:
        row, *kinds = line.split() or [""]
        if not re.fullmatch(r"GPU\d+", row) or "X" not in kinds:
            continue
        for column, kind in zip(columns, kinds, strict=False):
            pair = re.fullmatch(r"GPU(\d+)", column)
            if pair and int(row[3:]) < int(pair[1]) and {int(row[3:]), int(pair[1])} <= set(gpus):
                counts[kind] = counts.get(kind, 0) + 1
    return counts


def _is_among(index: str, uuid: str, visible: Sequence[str]) -> bool:
    """Return whether a GPU is visible; the visible UUIDs may be shortened."""
    return any(
        name == index or (name.startswith("GPU-") and uuid.startswith(name)) for name in visible
    )


def _rows(text: str) -> list[list[str]]:
    return [
        row
        for row in csv.reader(text.splitlines(), skipinitialspace=True)
        if len(row) == 4 and row[3].isdigit()
    ]


def _nvidia_smi(*words: str) -> str:
    """Return the output of nvidia-smi; empty if it does not exist or fails."""
    try:
        return subprocess.run(
            ["nvidia-smi", *words], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
