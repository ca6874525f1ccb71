"""Files of bitsandbytes: codes of 4 bits over the whole matrix in a row, or whole numbers."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from sidestep.executor.quantization.quantized_files import QuantizedFiles, part_of_columns
from sidestep.executor.quantization.stored_parts import FLOATS, check_words, read_as
from sidestep.executor.weights.weight_loader import CheckpointWeights, Matrix, Wanted
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.model.quantization.weight_scheme import WeightScheme
from sidestep.kernels.quantized.coded_matrix import TABLES, CodedMatrix

_LARGEST_CODE = 127.0
_ROW_FORMAT = 0
"""The number of the order of int8 that is read: by rows."""
_BYTES = (torch.uint8,)


class BitsAndBytesFiles(QuantizedFiles):
    """Reads NF4 and FP4, with scales that are quantized or not, and int8."""

    ends = ("weight.absmax", "SCB")

    def read(self, files: CheckpointWeights, wanted: Wanted, scheme: WeightScheme) -> Matrix:
        """Return the matrix, or a plain one where blocks do not lie within rows."""
        if f"{wanted.name}.SCB" in files:
            return self._read_int8(files, wanted)
        return part_of_columns(self._read_rows(files, wanted), wanted)

    def _read_int8(self, files: CheckpointWeights, wanted: Wanted) -> CodedMatrix:
        name, rows = wanted.name, wanted.shape[0]
        codes = read_as(
            files, (torch.int8,), f"{name}.weight", wanted.shape, wanted.rows, wanted.columns
        )
        scb = read_as(files, FLOATS, f"{name}.SCB", (rows,), wanted.rows)
        scales = scb.float() / _LARGEST_CODE
        if (key := f"{name}.weight_format") in files:
            form = int(files.stored(key, files.stored_shape(key)))
            if form != _ROW_FORMAT:
                raise EngineStartError(
                    f"model: {key} is {form}; supported is {_ROW_FORMAT}, the order by rows"
                )
        return CodedMatrix(
            kind="int8",
            codes=codes.contiguous(),
            scales=scales[:, None].contiguous(),
            group=(1, len(wanted.columns)),
            dtype=files.dtype,
        )

    def _read_rows(self, files: CheckpointWeights, wanted: Wanted) -> Matrix:
        """Return the wanted rows with all their columns."""
        (rows, columns), name = wanted.shape, wanted.name
        state = _state(files, name)
        size = int(state["blocksize"])
        absmax = _absmax(files, name, state)
        check_words(wanted, columns, range(0), 2)
        width = columns // 2
        part = range(wanted.rows.start * width, wanted.rows.stop * width)
        codes = read_as(files, _BYTES, f"{name}.weight", (rows * width, 1), part).view(-1, width)
        # The first of two numbers has the upper half.
        codes = (codes >> 4) | (codes << 4)
        table = read_as(files, FLOATS, f"{name}.weight.quant_map", (16,)).float()
        known = torch.tensor(TABLES["nf4"], device=table.device)
        if columns % size == 0 and torch.allclose(table, known, rtol=0, atol=1e-6):
            scales = absmax.view(rows, columns // size)[wanted.rows.start : wanted.rows.stop]
            return CodedMatrix(
                kind="nf4",
                codes=codes.contiguous(),
                scales=scales.contiguous(),
                group=(1, size),
                dtype=files.dtype,
            )
        first, last = wanted.rows.start * columns, wanted.rows.stop * columns
        scales = absmax[torch.arange(first, last, device=absmax.device) // size].view(-1, columns)
        numbers = table[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).int()]
        return (numbers * scales).to(files.dtype)


def _state(files: CheckpointWeights, name: str) -> dict[str, Any]:
    """Return what the file says of the blocks, which is JSON in a tensor of bytes."""
    for kind in ("nf4", "fp4"):
        key = f"{name}.weight.quant_state.bitsandbytes__{kind}"
        if key in files:
            state = files.stored(key, files.stored_shape(key))
            found: dict[str, Any] = json.loads(bytes(state.tolist()))
            return found
    raise EngineStartError(f"model: the checkpoint lacks {name}.weight.quant_state")


def _absmax(files: CheckpointWeights, name: str, state: dict[str, Any]) -> Tensor:
    """Return the scale of each block, in float32."""
    key = f"{name}.weight.absmax"
    absmax = read_as(files, (*_BYTES, *FLOATS), key, files.stored_shape(key))
    if absmax.dtype != torch.uint8:
        return absmax.float()
    nested_key, map_key = (f"{name}.weight.nested_{one}" for one in ("absmax", "quant_map"))
    nested = read_as(files, FLOATS, nested_key, files.stored_shape(nested_key)).float()
    values = read_as(files, FLOATS, map_key, files.stored_shape(map_key)).float()[absmax.int()]
    size = int(state["nested_blocksize"])
    wide = nested.repeat_interleave(size)[: len(values)]
    return values * wide + float(state["nested_offset"])
