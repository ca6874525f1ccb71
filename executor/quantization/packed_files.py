"""Files with several whole numbers in a word: GPTQ, AWQ, and compressed-tensors' packed form.

A word is an int32, whose lowest bits are its first number. The three pack along other dimensions,
and AWQ in another order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sidestep.executor.quantization.quantized_files import QuantizedFiles, whole_groups
from sidestep.executor.quantization.wide_files import WideFiles, ignore_input_scales
from sidestep.executor.weights.weight_loader import CheckpointWeights, Matrix, Wanted
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.model.quantization.weight_scheme import WeightScheme
from sidestep.kernels.quantized.coded_matrix import MIDDLE, CodedMatrix, pack_halves

WORD = 32
"""Bits of a word."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""By the column within a word: its place in the word."""
_BYTE_MIDDLE = 128
"""The code of 0 among codes of 8 bits without a sign."""


def unpack(words: Tensor, bits: int) -> Tensor:
    """Return the numbers of words along the last dimension: uint8 [.., W * 32 / bits]."""
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32)
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
    width: G.
    """
    scales = scales.float()
    minimums = None
    if scheme.kind == "int8":
        codes = (codes.to(torch.int16) - _BYTE_MIDDLE).to(torch.int8)
        if zeros is not None and bool((zeros != _BYTE_MIDDLE).any()):
            minimums = scales * (zeros - _BYTE_MIDDLE)
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
    ).to(files.device)


class GptqFiles(QuantizedFiles):
    """GPTQ, whose files have one less than each zero in their first version."""

    ends = ("qweight",)
    zero_shift = 1
    """The number that is added to the stored zeros."""

    def read(self, files: CheckpointWeights, wanted: Wanted, scheme: WeightScheme) -> Matrix:
        """Return the matrix; one in the run's type where the groups are not of neighbours."""
        (rows, columns), bits, name = wanted.shape, scheme.bits, wanted.name
        per_word, width = WORD // bits, scheme.columns or columns
        num_groups = -(-columns // width)
        check_words(wanted, columns, wanted.columns, per_word)
        words = files.stored(
            f"{name}.qweight",
            (columns // per_word, rows),
            rows=words_of(wanted.columns, per_word),
            columns=wanted.rows,
        )
        codes = unpack(words.t(), bits)
        scales = files.stored(f"{name}.scales", (num_groups, rows), columns=wanted.rows)
        packed = files.stored(
            f"{name}.qzeros",
            (num_groups, rows // per_word),
            columns=words_of(wanted.rows, per_word),
        )
        stored = cut(unpack(packed, bits), wanted.rows, per_word).to(torch.int32)
        # Where a zero of 0 was stored as the largest number, the sum begins again at 0.
        zeros = (stored + self.zero_shift) % (1 << bits)
        group_of = self._groups_of(files, wanted, width)
        if group_of is not None:
            numbers = codes.float() - zeros.t().float()[:, group_of]
            values = numbers * scales.t().float()[:, group_of]
            return values.to(device=files.device, dtype=files.dtype)
        own = whole_groups(wanted, width)
        part = slice(own.start, own.stop)
        # One group of all inputs is cut by ranks: each has its scale.
        return coded(
            codes,
            scales[part].t(),
            zeros[part].t(),
            scheme,
            min(width, len(wanted.columns)),
            files,
        )

    def _groups_of(self, files: CheckpointWeights, wanted: Wanted, width: int) -> Tensor | None:
        """Return the group of each input, where they are not those of neighbours."""
        name, columns = f"{wanted.name}.g_idx", wanted.shape[1]
        if name not in files:
            return None
        groups = files.stored(name, (columns,)).long()
        if torch.equal(groups, torch.arange(columns) // width):
            return None
        return groups[wanted.columns.start : wanted.columns.stop]


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
            stored = files.stored(f"{name}.{end}", (height, rows // per_word), part, words)
            in_words = unpack(stored, bits).unflatten(-1, (-1, per_word))
            ordered = in_words[..., list(_AWQ_ORDER)].flatten(-2)
            return cut(ordered, wanted.rows, per_word)

        scales = files.stored(f"{name}.scales", (groups, rows), own, wanted.rows)
        return coded(
            numbers("qweight", columns, wanted.columns).t(),
            scales.t(),
            numbers("qzeros", groups, own).t().to(torch.int32),
            scheme,
            min(width, len(wanted.columns)),
            files,
        )


class CompressedTensorsFiles(QuantizedFiles):
    """compressed-tensors: packed along the inputs, or a byte a number."""

    ends = ("weight_packed", "weight_scale")

    def read(self, files: CheckpointWeights, wanted: Wanted, scheme: WeightScheme) -> Matrix:
        """Return the matrix."""
        if f"{wanted.name}.weight_packed" not in files:
            return WideFiles().read(files, wanted, scheme)
        if scheme.kind == "fp4":
            return _read_fp4(files, wanted, scheme)
        (rows, columns), bits, name = wanted.shape, scheme.bits, wanted.name
        per_word, width = WORD // bits, scheme.columns or columns
        check_words(wanted, columns, wanted.columns, per_word)
        words = files.stored(
            f"{name}.weight_packed",
            (rows, -(-columns // per_word)),
            wanted.rows,
            words_of(wanted.columns, per_word),
        )
        codes = unpack(words, bits)[:, : len(wanted.columns)]
        own = whole_groups(wanted, width)
        size = rows, -(-columns // width)
        scales = files.stored(f"{name}.weight_scale", size, wanted.rows, own)
        files.leave([f"{name}.weight_shape"])
        ignore_input_scales(files, name)
        zeros = None
        if f"{name}.weight_zero_point" in files:
            packed = files.stored(
                f"{name}.weight_zero_point",
                (-(-rows // per_word), size[1]),
                words_of(wanted.rows, per_word),
                own,
            )
            zeros = cut(unpack(packed.t(), bits), wanted.rows, per_word).t().to(torch.int32)
        if f"{name}.weight_g_idx" in files:
            raise EngineStartError(
                f"model: {name}.weight_g_idx is not supported; supported are groups of "
                "neighbouring inputs"
            )
        return coded(codes, scales, zeros, scheme, min(width, len(wanted.columns)), files)


def _read_fp4(files: CheckpointWeights, wanted: Wanted, scheme: WeightScheme) -> CodedMatrix:
    """Return a matrix of e2m1: of MXFP4, or of NVFP4, whose scales have a scale of their own."""
    (rows, columns), name = wanted.shape, wanted.name
    width = scheme.columns
    check_words(wanted, columns, wanted.columns, 2)
    codes = files.stored(
        f"{name}.weight_packed", (rows, columns // 2), wanted.rows, words_of(wanted.columns, 2)
    )
    own = whole_groups(wanted, width)
    scales = files.stored(f"{name}.weight_scale", (rows, columns // width), wanted.rows, own)
    if scales.dtype == torch.uint8:
        values = torch.ldexp(torch.ones(scales.shape), scales.int() - 127)
    else:
        whole = files.stored(f"{name}.weight_global_scale", (1,)).float()
        values = scales.float() / whole
    files.leave([f"{name}.input_global_scale"])
    return CodedMatrix(
        kind="fp4",
        codes=codes.contiguous(),
        scales=values.contiguous(),
        group=(1, width),
        dtype=files.dtype,
    ).to(files.device)


def check_words(wanted: Wanted, size: int, part: range, per_word: int) -> None:
    """Raise EngineStartError unless a dimension and a rank's part of it are whole words."""
    if size % per_word:
        raise EngineStartError(
            f"model: {wanted.name} has {size} numbers along the dimension that is packed, which "
            f"must be a multiple of {per_word}"
        )
    if part.start % per_word or part.stop % per_word:
        raise EngineStartError(
            f"tensor_parallel_size: a rank's part {part.start} to {part.stop} of {wanted.name} is "
            f"not a multiple of {per_word}; use fewer ranks"
        )
