"""Configurations of the products of experts."""

from __future__ import annotations

from dataclasses import dataclass


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
    registers: int | None = None
    """Registers of a thread, if the compiler would take too many for all programs to run at once.
    """


@dataclass(frozen=True)
class WaitingConfig:
    """Partition of the last product of a few pairs whose matrices wait in shared memory."""

    columns: int
    """Outputs of a program, of all pairs of a token."""
    warps: int


@dataclass(frozen=True)
class SortedConfig:
    """Partition of a product of sorted pairs."""

    columns: int
    """Outputs of a program; of gate and up, each."""
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
class StreamConfigs:
    """Sorted pairs whose experts' matrices stream by (kernels/experts/streamed_pairs.py)."""

    pairs: int
    """Pairs of a tile, a multiple of 8: the columns of the tensor cores' second operand."""


@dataclass(frozen=True)
class ClusterConfigs:
    """Sorted pairs that clusters of processors multiply (kernels/experts/clustered_pairs.py)."""


@dataclass(frozen=True)
class FewConfigs:
    """Configurations of both products."""

    gate_up: FewConfig
    down: FewConfig | WaitingConfig


@dataclass(frozen=True)
class CodedConfig:
    """Partition of a product of coded experts."""

    rows: int = 64
    """Rows of matrices of a program: of the gate and of the other half, or of a token's experts.
    The tensor cores take 64."""
    warps: int = 4
    stages: int = 5
    """Steps that are loading at once."""


@dataclass(frozen=True)
class CodedConfigs:
    """Configurations of both products."""

    gate_up: CodedConfig = CodedConfig()
    down: CodedConfig = CodedConfig()
    pairs: int = 16
    """Pairs of an expert that share a program; not of the last product of a few pairs."""
    in_tiles: bool = False
    """Whether the pairs are sorted."""


@dataclass(frozen=True)
class RegisterConfig:
    """Partition of a product of a few pairs of coded experts, which come from registers."""

    warps: int
    """Warps of a program: for down, at least one for each expert of a token."""
    stages: int
    """Steps that are loading at once."""
    waits: bool = False
    """Whether all weights of a program wait in shared memory instead, for down."""


@dataclass(frozen=True)
class RegisterConfigs:
    """Configurations of both products."""

    gate_up: RegisterConfig
    down: RegisterConfig
    rows: int = 16
    """Rows of a program of the first product, half of them of the gate."""


def few_configs() -> FewConfigs:
    """Return the configurations for a few pairs."""
    return FewConfigs(FewConfig(8, 256), FewConfig(4, 256, stages=1, registers=128))


_HALF_A_PROCESSOR = 113 << 10
"""Shared memory of a program of which two share a processor."""
_LEAST_EXPERTS = 4
_MOST_STEPS = 32
"""Steps of 64 columns that are written out one after the other."""


def kept_experts(chosen: int) -> tuple[int, int]:
    """Return two powers of two: room for a token's first experts, and for those behind them.

    The second one is 0 where both would have as much room as one, and where warps would be too many
    for the first experts.
    """
    room = 1 << (chosen - 1).bit_length()
    first, behind = room // 2, chosen - room // 2
    last = 1 << (behind - 1).bit_length()
    pays = first >= _LEAST_EXPERTS and first + last < room
    return (first, last) if pays else (room, 0)


def waiting_config(rows: int, inner_width: int, chosen: int) -> WaitingConfig | None:
    """Return how matrices of 16 bits wait in shared memory, or None if they are too long.

    The outputs of a program do not depend on the number of rows. Warps share out a token's experts,
    so there must be some.
    """
    kept, steps = sum(kept_experts(chosen)), -(-inner_width // 64)
    if kept < _LEAST_EXPERTS or inner_width % 8 != 0 or steps > _MOST_STEPS:
        return None
    for columns in (8, 4):
        if kept * (columns + 1) * steps * 128 <= _HALF_A_PROCESSOR:
            return WaitingConfig(columns, 8 if rows == 1 else 4)
    return None


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


def stream_configs(pairs: int, experts: int) -> StreamConfigs:
    """Return the configurations for as many pairs in all, on a Hopper GPU.

    An expert with more pairs than a tile is read twice, and larger tiles take more time.
    """
    each = pairs / experts
    return StreamConfigs(16 if each < 6 else 32 if each < 20 else 48 if each < 30 else 64)


def coded_configs(pairs: int, experts: int, *, few: bool) -> CodedConfigs:
    """Return the configurations for coded experts, and as many pairs in all."""
    if few:
        return CodedConfigs()
    each = pairs / experts
    if each >= 96:
        large = CodedConfig(128, warps=8, stages=4)
        return CodedConfigs(large, large, 128, in_tiles=True)
    if each >= 48:
        middle = CodedConfig(128, warps=8, stages=3)
        return CodedConfigs(middle, middle, 64, in_tiles=True)
    small = CodedConfig(128, stages=4)
    return CodedConfigs(small, small, 16 if each < 12 else 32, in_tiles=True)


_STEP = 128
"""Columns of a step of products from registers."""
_MOST_TURNS = 12
"""Steps of one warp, which are written out one after the other."""
_MOST_WAITING = 200 << 10
"""Bytes of a program whose weights, and inner values, are all in shared memory at once."""


def register_configs(
    rows: int, width: int, inner_width: int, chosen: int, *, four_bits: bool
) -> RegisterConfigs | None:
    """Return the configurations for these inputs and inner values, or None if they are too many.

    The shares of warps do not depend on the number of rows, so a row's bits do not either.
    """
    kept = 1 << (chosen - 1).bit_length()
    gate_up = next((w for w in (4, 8, 16) if -(-width // _STEP) <= w * _MOST_TURNS), None)
    shares = (w for w in (8, 16) if w >= kept)
    down = next((w for w in shares if -(-inner_width // _STEP) <= w // kept * _MOST_TURNS), None)
    if gate_up is None or down is None:
        return None
    columns = -(-inner_width // _STEP) * _STEP
    held = kept * columns * (16 // (1 + four_bits) + 2)
    waits = rows == 1 and held <= _MOST_WAITING
    if not four_bits:
        return RegisterConfigs(RegisterConfig(gate_up, 4), RegisterConfig(down, 4, waits))
    if rows == 1:
        return RegisterConfigs(RegisterConfig(gate_up, 2), RegisterConfig(down, 2, waits))
    return RegisterConfigs(RegisterConfig(gate_up, 2), RegisterConfig(down, 4), 32)
