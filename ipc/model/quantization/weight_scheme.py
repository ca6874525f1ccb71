"""How the matrices of a model are quantized: which of them, and in which form."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

Codes = Literal["fp8", "int8", "int4", "nf4", "fp4"]
"""Kinds of codes; see kernels/quantized/coded_matrix.py."""
Rounded = Literal["fp8", "int8"]
"""Types in 8 bits that inputs of products may be rounded to."""
_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""Parts of matrices that some lists name by the whole."""
_BITS = {"fp8": 8, "int8": 8}
_SCALE_BYTES = 4
HEAD = "lm_head"
"""Name of the output head."""


class WeightScheme(msgspec.Struct, frozen=True, kw_only=True):
    """The form of a matrix [N, K]."""

    kind: Codes
    rows: int = 1
    """Rows that share a scale; 0 for all."""
    columns: int = 0
    """Columns that share a scale; 0 for all."""
    offset: bool = False
    """Whether groups have a zero or a minimum of their own."""
    fitted: bool = False
    """Whether groups of four bits have a minimum rather than a zero; see encode."""
    scale_bytes: int = _SCALE_BYTES
    """Bytes in which a worker keeps a scale."""
    decoded: bool = False
    """Whether a worker keeps the numbers themselves, in the run's type."""
    activations: Rounded | None = None
    """Type that inputs are rounded to in steps of many tokens, on GPUs that multiply such numbers;
    None where they stay in the run's type."""

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return _BITS.get(self.kind, 4)

    def num_bytes(self, num_rows: int, num_columns: int, itemsize: int) -> int:
        """Return the size of a matrix in a worker: its codes, scales and zeros.

        itemsize: bytes of a number in the run's type.
        """
        # Blocks of nf4 run over the whole matrix; those that cross rows are decoded.
        if self.decoded or (self.kind == "nf4" and num_columns % self.columns):
            return num_rows * num_columns * itemsize
        rows, columns = self.rows or num_rows, self.columns or num_columns
        groups = -(-num_rows // rows) * -(-num_columns // columns)
        # The zero of four bits is a code; that of more bits is kept as a minimum, like a scale.
        is_code = self.bits < 8 and not self.fitted
        offset = self.offset * (1 if is_code else _SCALE_BYTES)
        return num_rows * num_columns * self.bits // 8 + groups * (self.scale_bytes + offset)


class SchemeRule(msgspec.Struct, frozen=True, kw_only=True):
    """The scheme of the matrices that a pattern names."""

    pattern: str
    """A regular expression for names of matrices, which it matches from their beginning."""
    scheme: WeightScheme | None
    """None: not quantized."""
    assumed: bool = False
    """Whether the files do not state it, so that it does not count for a matrix that they have."""


class QuantizationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How a checkpoint's matrices are quantized, or are when they are loaded."""

    method: str
    """Name in the registry."""
    rules: tuple[SchemeRule, ...] = ()
    """The first one that matches counts."""
    default: WeightScheme | None = None
    """Scheme of the matrices that no rule names."""
    online: bool = False
    """Whether the checkpoint is plain, and matrices are quantized while they are loaded."""
    fp8_kv: bool = False
    """Whether the files ask for keys and values in e4m3."""
    head: WeightScheme | None = None
    """Form in 8 bits that a plain output head is rounded to while it is loaded; None to keep it."""

    @property
    def is_empty(self) -> bool:
        """Whether all matrices of products are plain."""
        return self.default is None and all(rule.scheme is None for rule in self.rules)

    def scheme(self, *names: str, stored: bool = False) -> WeightScheme | None:
        """Return how a matrix is quantized; None if it is not.

        names: of the matrix, without ".weight", in the model and in the checkpoint. stored: whether
        the checkpoint has it in a quantized form.
        """
        every = [alias for name in names for alias in _aliases(name)]
        for rule in self.rules:
            if rule.assumed and stored:
                continue
            if any(re.match(rule.pattern, name) for name in every):
                return rule.scheme
        return self.default


def _aliases(name: str) -> Iterator[str]:
    """Yield a matrix's name, and that of the whole that it is a part of."""
    yield name
    before, _, last = name.rpartition(".")
    if last in _FUSED:
        yield f"{before}.{_FUSED[last]}"


def names_pattern(entry: str) -> str:
    """Return the pattern of an entry in a list of modules that are not quantized.

    An entry with "re:" is a regular expression. Another names a module, by its whole name or by
    some of its parts, and so all that is in the module.
    """
    if entry.startswith("re:"):
        return entry.removeprefix("re:")
    return rf"(.*\.)?{re.escape(entry.strip('.'))}(\..*)?$"


PLAIN_HEAD = SchemeRule(pattern=names_pattern(HEAD), scheme=None, assumed=True)
"""Most files leave the head plain, and do not state it."""


def plain_rules(entries: Iterable[str]) -> tuple[SchemeRule, ...]:
    """Return the rules for a list of modules that are not quantized."""
    return tuple(SchemeRule(pattern=names_pattern(entry), scheme=None) for entry in entries)
