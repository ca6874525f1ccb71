"""Files of compressed-tensors: packed into words along the inputs, or a byte a number."""

from __future__ import annotations

import torch

from sidestep.executor.quantization.fp4_files import read_packed_fp4
from sidestep.executor.quantization.packed_files import (
    WORD,
    WORDS,
    coded,
    cut,
    groups_of,
    in_groups,
    unpack,
    words_of,
)
from sidestep.executor.quantization.quantized_files import QuantizedFiles
from sidestep.executor.quantization.stored_parts import (
    FLOATS,
    check_words,
    read_as,
    whole_groups,
)
from sidestep.executor.quantization.wide_files import WideFiles, ignore_input_scales
from sidestep.executor.weights.weight_loader import CheckpointWeights, Matrix, Wanted
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.model.quantization.weight_scheme import WeightScheme

_WORD_BYTES = 4


class CompressedTensorsFiles(QuantizedFiles):
    """Reads all formats; the names of the tensors and the scheme tell them apart."""

    ends = ("weight_packed", "weight_scale")

    def read(self, files: CheckpointWeights, wanted: Wanted, scheme: WeightScheme) -> Matrix:
        """Return the matrix; one in the run's type where the groups are not of neighbours."""
        if f"{wanted.name}.weight_packed" not in files:
            return WideFiles().read(files, wanted, scheme)
        if scheme.kind == "fp4":
            return read_packed_fp4(files, wanted, scheme)
        if scheme.kind not in ("int4", "int8"):
            raise EngineStartError(
                f"model: {wanted.name} has weight_packed, and its config says {scheme.kind}; "
                "supported are int4, int8 and fp4"
            )
        (rows, columns), bits, name = wanted.shape, scheme.bits, wanted.name
        per_word, width = WORD // bits, scheme.columns or columns
        # The last word of a row may be filled up.
        check_words(wanted, columns, wanted.columns, per_word, unit=per_word // _WORD_BYTES)
        words = read_as(
            files,
            WORDS,
            f"{name}.weight_packed",
            (rows, -(-columns // per_word)),
            wanted.rows,
            words_of(wanted.columns, per_word),
        )
        codes = unpack(words, bits)[:, : len(wanted.columns)]
        files.leave([f"{name}.weight_shape"])
        ignore_input_scales(files, name)
        group_of = groups_of(files, "weight_g_idx", wanted, width)
        size = rows, -(-columns // width)
        own = range(size[1]) if group_of is not None else whole_groups(wanted, width)
        scales = read_as(files, FLOATS, f"{name}.weight_scale", size, wanted.rows, own)
        zeros = None
        if f"{name}.weight_zero_point" in files:
            packed = read_as(
                files,
                WORDS,
                f"{name}.weight_zero_point",
                (-(-rows // per_word), size[1]),
                words_of(wanted.rows, per_word),
                own,
            )
            zeros = cut(unpack(packed.t(), bits), wanted.rows, per_word).t().to(torch.int32)
        if group_of is not None:
            return in_groups(codes, scales, zeros, group_of, scheme, files)
        return coded(codes, scales, zeros, scheme, width, files)
