"""Matrices of products in GGUF files, whose types may differ from one to the next."""

from __future__ import annotations

from sidestep.executor.quantization.quantized_files import QuantizedFiles
from sidestep.executor.quantization.stored_parts import whole_groups
from sidestep.executor.weights.gguf_weights import GgufWeights
from sidestep.executor.weights.weight_loader import CheckpointWeights, Matrix, Wanted
from sidestep.ipc.model.quantization.weight_scheme import WeightScheme


class GgufMatrices(QuantizedFiles):
    """Reads matrices of each type: as codes where there are such ones, else as numbers."""

    ends = ("weight",)

    def read(self, files: CheckpointWeights, wanted: Wanted, scheme: WeightScheme) -> Matrix:
        """Return the matrix. The file says its form, and not the scheme."""
        assert isinstance(files, GgufWeights)
        part = files.matrix_part(wanted.name, wanted.shape)
        if not part.is_coded:
            name = f"{wanted.name}.weight"
            return files.get(name, wanted.shape, wanted.rows, wanted.columns)
        # A rank's columns may begin within a block, if no group is cut.
        size, columns = part.block_size, wanted.columns
        blocks = range(columns.start // size, -(-columns.stop // size))
        matrix = part.coded(wanted.rows, blocks, files.dtype)
        width, packed, start = matrix.group[1], matrix.packed, blocks.start * size
        groups = whole_groups(wanted, width)
        if len(groups) < matrix.scales.shape[1]:
            first = groups.start - start // width
            own = slice((columns.start - start) // packed, (columns.stop - start) // packed)
            matrix = matrix.columns(own, slice(first, first + len(groups)))
        return matrix.to(files.device)
