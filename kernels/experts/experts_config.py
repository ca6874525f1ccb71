"""Configurations of the products of experts."""

from __future__ import annotations

from dataclasses import dataclass

from sidestep.kernels.experts.expert_matrix import ExpertMatrix


@dataclass(frozen=True)
class FewConfig:
    """Partition of a product in which each pair is multiplied by itself."""

    columns: int
    """Outputs of a program: of one pair for gate and up, of all pairs of a token for down."""
    step: int
    """Inputs of a step."""
    warps: int = 4
    stages: int = 3
    """Tiles that are loading at once."""


@dataclass(frozen=True)
class SortedConfig:
    """Partition of a product of sorted pairs."""

    columns: int
    """Outputs of a program; of gate and up, each."""
    step_bytes: int = 128
    """Bytes of the pairs' inputs in a step."""
    warps: int = 4
    stages: int = 3
    swapped: bool = False
    """Whether the tensor cores take the weights as their first operand, of 64 rows at least. The
    second may have as few as 8 columns, so fewer of them are padding."""


@dataclass(frozen=True)
class SortedConfigs:
    """Configurations of both products."""

    pairs: int
    """Pairs of a tile."""
    gate_up: SortedConfig
    down: SortedConfig


@dataclass(frozen=True)
class FewConfigs:
    """Configurations of both products."""

    gate_up: FewConfig
    down: FewConfig


def few_configs(matrix: ExpertMatrix) -> FewConfigs:
    """Return the configurations for a few pairs. matrix: one of the products' matrices."""
    if matrix.groups is not None:
        # A thread sums 64 numbers at most; two of four bits are summed as one.
        at_once = 512 if matrix.groups[0] in ("int4", "mxfp4") else 256
        return FewConfigs(FewConfig(8, 512, stages=1), FewConfig(4, at_once, stages=1))
    return FewConfigs(FewConfig(8, 256), FewConfig(4, 256, stages=1))


def sorted_configs(pairs: int, experts: int) -> SortedConfigs:
    """Return the configurations for as many pairs in all."""
    each = pairs / experts
    if each >= 96:
        large = SortedConfig(128, warps=8)
        return SortedConfigs(128, large, large)
    if each >= 48:
        middle = SortedConfig(128, stages=4)
        return SortedConfigs(64, middle, middle)
    small = SortedConfig(128, warps=8, swapped=True)
    return SortedConfigs(32, small, small)
