"""Matrices in few bits as a GPU reads them: repacked once, when they are loaded.

Codes lie in words of 32 bits, in an order in which a thread decodes what the tensor cores want of
it, two numbers at a time, without a conversion and without other threads' codes:

- A piece of a row, 16 words, has 64 columns of 8 bits or 128 of 4 bits. Word 4 t + c of a piece
  belongs to thread t of four, which needs columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of each 16.
- The numbers of two neighbouring columns are 16 bits apart in their word. So one mask selects both,
  and an exponent beside them makes both a bfloat16 or float16.

Columns are filled up to whole pieces. Scales lie with rows next to each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sidestep.kernels.quantized.coded_matrix import MIDDLE, CodedMatrix, Codes, Rounded

STEP = 128
"""Columns are filled up to a multiple of this, the step of the products."""
_LEAST_GROUP = 16
"""Least number of columns of a group."""
_AT_ONCE = 1 << 24
"""Numbers that are repacked at a time, so that copies take little memory."""


@dataclass(frozen=True, kw_only=True)
class DeviceMatrix:
    """A coded matrix [N, K] as the kernels read it."""

    kind: Codes
    words: Tensor
    """int32 [N, K filled up / numbers in a word]."""
    scales: Tensor
    """float32 [K / G, N / R], both rounded up. With zeros, the lowest four bits are the zero: the
    scale loses at most a part in 2^19, and none of a scale that was float16 or bfloat16."""
    minimums: Tensor | None
    """float32, like the scales: what is subtracted at the end."""
    shape: tuple[int, int]
    """N and K."""
    group: tuple[int, int]
    """R and G: rows and columns that share a scale. G is 0 where a row has one scale, else 16, 32,
    64 or a multiple of 128."""
    zeros: bool
    """Whether groups have zeros of their own."""
    dtype: torch.dtype
    """Type of the inputs and results of its products."""
    rounded: Rounded | None = None
    """Type in 8 bits that inputs may be rounded to."""
    input_scale: Tensor | None = None
    """float32 [1]: the scale of all rounded inputs; None where each row has its own."""

    @classmethod
    def of(cls, matrix: CodedMatrix) -> DeviceMatrix:
        """Return the matrix, repacked. Raises ValueError for groups that no kernel reads."""
        matrix = _with_finite_codes(with_simple_groups(matrix))
        if matrix.group[1] >= matrix.shape[1]:
            matrix = matrix.with_row_scales()
        scales = with_zeros(matrix.scales, matrix.zeros).t().contiguous()
        height, width = matrix.group
        return cls(
            kind=matrix.kind,
            words=_repacked(matrix),
            scales=scales,
            minimums=None if matrix.minimums is None else matrix.minimums.t().contiguous(),
            shape=matrix.shape,
            group=(height, 0 if width >= matrix.shape[1] else width),
            zeros=matrix.zeros is not None,
            dtype=matrix.dtype,
            rounded=matrix.activations,
            input_scale=matrix.input_scale,
        )

    @property
    def in_word(self) -> int:
        """Numbers in a word."""
        return 4 if self.kind in ("fp8", "int8") else 8

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.words.device


def with_zeros(scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Return float32 scales with their zeros, if any, in the lowest four bits."""
    if zeros is None:
        return scales
    rounded = scales.contiguous().view(torch.int32) + 8 & ~15
    return (rounded | zeros.to(torch.int32)).view(torch.float32)


def with_simple_groups(matrix: CodedMatrix) -> CodedMatrix:
    """Return the matrix with groups of 16, 32, 64 or a multiple of 128 columns, or a row's own."""
    height, width = matrix.group
    if width >= matrix.shape[1] or width % STEP == 0:
        return matrix
    part = min(STEP, width & -width)
    if part < _LEAST_GROUP:
        raise ValueError(
            f"{matrix.described} cannot be multiplied on a GPU: groups must have a multiple of "
            f"{_LEAST_GROUP} columns, or all columns"
        )
    count = -(-matrix.shape[1] // part)

    def spread(values: Tensor) -> Tensor:
        return values.repeat_interleave(width // part, 1)[:, :count]

    zeros, minimums = (
        None if values is None else spread(values) for values in (matrix.zeros, matrix.minimums)
    )
    return replace(
        matrix, scales=spread(matrix.scales), zeros=zeros, minimums=minimums, group=(height, part)
    )


def _with_finite_codes(matrix: CodedMatrix) -> CodedMatrix:
    """Return the matrix with NaN as a scale where a code is NaN.

    Either makes a whole column of the product NaN. So the kernels need not look for such codes.
    """
    if matrix.kind != "fp8" or matrix.codes.is_meta:
        return matrix
    codes = matrix.codes.view(torch.uint8)
    bad = (codes & 127) == 127
    found = bad.any(1)
    if not bool(found.any()):
        return matrix
    matrix = matrix.with_row_scales()
    scales = matrix.scales.clone()
    scales[found] = float("nan")
    clean = codes.masked_fill(bad, 0).view(torch.float8_e4m3fn)
    return replace(matrix, codes=clean, scales=scales)


def _repacked(matrix: CodedMatrix) -> Tensor:
    """Return the words of a matrix's codes."""
    rows, columns = matrix.shape
    whole = -(-columns // STEP) * STEP
    packed = matrix.packed
    words = torch.empty(rows, whole // (4 * packed), dtype=torch.int32, device=matrix.codes.device)
    codes = matrix.codes.view(torch.uint8)
    pack: Callable[[Tensor], Tensor] = _words_of_bytes if packed == 1 else _words_of_halves
    filling = 0 if packed == 1 or matrix.kind != "int4" else MIDDLE * 17
    step = max(1, _AT_ONCE // whole)
    for first in range(0, rows, step):
        part = codes[first : first + step]
        filled = torch.nn.functional.pad(part, (0, whole // packed - part.shape[1]), value=filling)
        words[first : first + step] = pack(filled)
    return words


def _words_of_bytes(codes: Tensor) -> Tensor:
    """Return the words of codes of 8 bits, uint8 [N, K]."""
    rows = codes.shape[0]
    # Columns are 64 piece + 16 c + 8 half + 2 t + neighbour. Bytes 1 and 3 of a word are neighbours
    # of the first half, bytes 0 and 2 of the second one.
    pieces = codes.view(rows, -1, 4, 2, 4, 2).permute(0, 1, 4, 2, 5, 3).flip(-1)
    return pieces.contiguous().view(rows, -1).view(torch.int32)


def _words_of_halves(pairs: Tensor) -> Tensor:
    """Return the words of codes of 4 bits, uint8 [N, K / 2]."""
    rows = pairs.shape[0]
    codes = torch.stack([pairs & 15, pairs >> 4], -1)
    # Columns are 128 piece + 32 c + 16 j + 8 half + 2 t + neighbour. Byte 2 neighbour + j of a word
    # has the code of the first half in its lower bits.
    pieces = codes.view(rows, -1, 4, 2, 2, 4, 2).permute(0, 1, 5, 2, 6, 3, 4)
    return (pieces[..., 0] | (pieces[..., 1] << 4)).contiguous().view(rows, -1).view(torch.int32)
