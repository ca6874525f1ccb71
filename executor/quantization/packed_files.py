"""Files with several whole numbers in a word: GPTQ and AWQ.

A word is an int32, whose lowest bits are its first number. The two pack along other dimensions, and
AWQ in another order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sidestep.executor.quantization.quantized_files import QuantizedFiles
from sidestep.executor.quantization.stored_parts import (
    FLOATS,
    check_words,
    read_as,
    whole_groups,
)
from sidestep.executor.weights.weight_loader import CheckpointWeights, Matrix, Wanted
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.model.quantization.weight_scheme import WeightScheme
from sidestep.kernels.quantized.coded_matrix import MIDDLE, CodedMatrix, pack_halves

WORD = 32
"""Bits of a word."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""By the column within a word: its place in the word."""
BYTE_MIDDLE = 128
"""The code of 0 among codes of 8 bits without a sign."""
WORDS = (torch.int32,)
"""Types of words in files."""


def unpack(words: Tensor, bits: int) -> Tensor:
    """Return the numbers of words along the last dimension: uint8 [.., W * 32 / bits]."""
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32, device=words.device)
    numbers = (words[..., None] >> shifts) & ((1 << bits) - 1)
    return numbers.flatten(-2).to(torch.uint8)


def cut(numbers: Tensor, rows: range, per_word: int) -> Tensor:
    """Return the wanted ones of columns that were read in whole words."""
    start = rows.start % per_word
    return numbers[:, start : start + len(rows)]


def words_of(numbers: range, per_word: int) -> range:
    """Return the words that hold numbers."""
    return range(numbers.start // per_word, -(-numbers.stop // per_word))


def coded(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    scheme: WeightScheme,
    width: int,
    files: CheckpointWeights,
) -> CodedMatrix:
    """Return the matrix of codes without a sign, uint8 [N, K].

    scales [N, K / G]. zeros: int32 like the scales, the codes of 0; None for the middle ones.
    width: G, of which a rank may have a part.
    """
    scales, width = scales.float(), min(width, codes.shape[1])
    minimums = None
    if scheme.kind == "int8":
        codes = (codes.to(torch.int16) - BYTE_MIDDLE).to(torch.int8)
        if zeros is not None and bool((zeros != BYTE_MIDDLE).any()):
            minimums = scales * (zeros - BYTE_MIDDLE)
        zeros = None
    else:
        codes = pack_halves(codes)
        if zeros is not None and bool((zeros == MIDDLE).all()):
            zeros = None
    return CodedMatrix(
        kind=scheme.kind,
        codes=codes.contiguous(),
        scales=scales.contiguous(),
        group=(1, width),
        dtype=files.dtype,
        zeros=None if zeros is None else zeros.to(torch.uint8).contiguous(),
        minimums=None if minimums is None else minimums.contiguous(),
    )


def in_groups(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group_of: Tensor,
    scheme: WeightScheme,
    files: CheckpointWeights,
) -> Tensor:
    """Return the numbers of a matrix whose groups are not of neighbours, in the run's type.

    group_of: int64 [K], the group of each input. Others: see `coded`.
    """
    if zeros is None:
        zeros = torch.full_like(scales, BYTE_MIDDLE if scheme.bits == 8 else MIDDLE)
    numbers = codes.float() - zeros.float()[:, group_of]
    values = numbers * scales.float()[:, group_of]
    return values.to(files.dtype)


def groups_of(files: CheckpointWeights, end: str, wanted: Wanted, width: int) -> Tensor | None:
    """Return the group of each wanted input, int64; None where they are those of neighbours."""
    name, columns = f"{wanted.name}.{end}", wanted.shape[1]
    if name not in files:
        return None
    groups = read_as(files, (torch.int32, torch.int64), name, (columns,)).long()
    # Tools that have not ordered the inputs may write -1.
    neighbours = torch.arange(columns, device=groups.device) // width
    if torch.equal(groups, neighbours) or bool((groups == -1).all()):
        return None
    count = -(-columns // width)
    if int(groups.min()) < 0 or int(groups.max()) >= count:
        raise EngineStartError(f"model: {name} has groups that are not among the {count} of scales")
    return groups[wanted.columns.start : wanted.columns.stop]


class GptqFiles(QuantizedFiles):
    """GPTQ, whose files have one less than each zero in their first version."""

    ends = ("qweight",)
    zero_shift = 1
    """Added to the stored zeros."""

    def read(self, files: CheckpointWeights, wanted: Wanted, scheme: WeightScheme) -> Matrix:
        """Return the matrix; one in the run's type where the groups are not of neighbours."""
        (rows, columns), bits, name = wanted.shape, scheme.bits, wanted.name
        per_word, width = WORD // bits, scheme.columns or columns
        num_groups = -(-columns // width)
        check_words(wanted, columns, wanted.columns, per_word)
        check_words(wanted, rows, range(0), per_word)
        words = read_as(
            files,
            WORDS,
            f"{name}.qweight",
            (columns // per_word, rows),
            rows=words_of(wanted.columns, per_word),
            columns=wanted.rows,
        )
        codes = unpack(words.t(), bits)
        scales = read_as(files, FLOATS, f"{name}.scales", (num_groups, rows), columns=wanted.rows)
        packed = read_as(
            files,
            WORDS,
            f"{name}.qzeros",
            (num_groups, rows // per_word),
            columns=words_of(wanted.rows, per_word),
        )
        stored = cut(unpack(packed, bits), wanted.rows, per_word).to(torch.int32)
        # Where a zero of 0 was stored as the largest number, the sum begins again at 0.
        zeros = (stored + self.zero_shift) % (1 << bits)
        group_of = groups_of(files, "g_idx", wanted, width)
        if group_of is not None:
            return in_groups(codes, scales.t(), zeros.t(), group_of, scheme, files)
        own = whole_groups(wanted, width)
        part = slice(own.start, own.stop)
        return coded(codes, scales[part].t(), zeros[part].t(), scheme, width, files)


class GptqV2Files(GptqFiles):
    """GPTQ, whose files have the zeros themselves."""

    zero_shift = 0


class AwqFiles(QuantizedFiles):
    """AWQ, which packs along the outputs."""

    ends = ("qweight",)

    def read(self, files: CheckpointWeights, wanted: Wanted, scheme: WeightScheme) -> Matrix:
        """Return the matrix."""
        (rows, columns), bits, name = wanted.shape, scheme.bits, wanted.name
        per_word, width = WORD // bits, scheme.columns or columns
        check_words(wanted, rows, range(0), per_word)
        groups, own = -(-columns // width), whole_groups(wanted, width)
        words = words_of(wanted.rows, per_word)

        def numbers(end: str, height: int, part: range) -> Tensor:
            size = height, rows // per_word
            stored = read_as(files, WORDS, f"{name}.{end}", size, part, words)
            in_words = unpack(stored, bits).unflatten(-1, (-1, per_word))
            ordered = in_words[..., list(_AWQ_ORDER)].flatten(-2)
            return cut(ordered, wanted.rows, per_word)

        scales = read_as(files, FLOATS, f"{name}.scales", (groups, rows), own, wanted.rows)
        return coded(
            numbers("qweight", columns, wanted.columns).t(),
            scales.t(),
            numbers("qzeros", groups, own).t().to(torch.int32),
            scheme,
            width,
            files,
        )
