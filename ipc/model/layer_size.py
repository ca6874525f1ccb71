"""Sizes of layers and of their parts, what they keep of tokens, and what ranks share out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import msgspec

from sidestep.ipc.model.quantization.weight_scheme import WeightScheme


@dataclass(frozen=True)
class MatrixSize:
    """Some matrices of products that are alike: those of a rank, or a rank's parts of them."""

    name: str
    """The first one's name in the checkpoint, within its layer."""
    rows: int
    columns: int
    count: int = 1
    active: Fraction = Fraction(1)
    """The part of the matrices that one token is multiplied with, on average."""
    scheme: WeightScheme | None = None
    """The form that they have in all files; None where the model's quantization says it."""
    may_be_coded: bool = True
    """Whether they are quantized with the others."""

    @property
    def numbers(self) -> int:
        """The number of weights."""
        return self.rows * self.columns * self.count

    def num_bytes(self, scheme: WeightScheme | None, itemsize: int) -> int:
        """Return the bytes in this form; None for numbers of `itemsize` bytes."""
        if scheme is None:
            return self.numbers * itemsize
        return self.count * scheme.num_bytes(self.rows, self.columns, itemsize)


def active_numbers(matrices: Iterable[MatrixSize]) -> int:
    """Return the number of weights that one token is multiplied with."""
    return int(sum((one.numbers * one.active for one in matrices), Fraction(0)))


@dataclass(frozen=True, kw_only=True)
class LayerSize:
    """Counts of a layer or of one of its parts, or of one rank's share; numbers, not bytes."""

    matrices: int = 0
    """Weights of products."""
    active: int = 0
    """Weights of products that one token is multiplied with."""
    vectors: int = 0
    """Biases, and the weights of norms."""
    kv_per_token: int = 0
    """Keys and values of a token in the cache."""
    state: int = 0
    """Numbers of a sequence's state, however long it is. Each step reads and writes them."""
    widest: int = 0
    """Most numbers of a token that are in memory between two products."""

    @property
    def parameters(self) -> int:
        """All weights."""
        return self.matrices + self.vectors

    def __add__(self, other: LayerSize) -> LayerSize:
        return LayerSize(
            matrices=self.matrices + other.matrices,
            active=self.active + other.active,
            vectors=self.vectors + other.vectors,
            kv_per_token=self.kv_per_token + other.kv_per_token,
            state=self.state + other.state,
            widest=max(self.widest, other.widest),
        )


class Divided(msgspec.Struct, frozen=True):
    """A number that tensor-parallel ranks share out."""

    name: str
    count: int
    may_repeat: bool = False
    """Whether several ranks may have the same one, where there are fewer than ranks."""

    def fits(self, num_ranks: int) -> bool:
        """Return whether that many ranks can share it out."""
        return self.count % num_ranks == 0 or (self.may_repeat and num_ranks % self.count == 0)


KvFormat = Literal["model", "fp8", "int8", "int4"]
"""How keys and values are kept: in the model's type, or as codes of 8 or 4 bits with scales.

fp8 is e4m3. There is a scale for each token and head, one of its key and one of its value.
"""
_CODE_BITS = {"fp8": 8, "int8": 8, "int4": 4}
SCALE_BYTES = {"fp8": 2, "int8": 2, "int4": 4}
"""Bytes beside the codes of a head: a float16 scale, and for int4 the code of zero.

With a float32 scale, heads of size 64 would take 68 bytes for the 128 of bfloat16; with float16
they take 66. The codes are computed with the rounded scale, so that it adds no error. A code times
such a scale is exact in float32.
"""


class LayerKv(msgspec.Struct, frozen=True, kw_only=True):
    """Keys and values that one rank keeps of a token in one layer."""

    num_kv_heads: int
    head_dim: int
    format: KvFormat = "model"

    @property
    def num_values(self) -> int:
        """The number of keys and values of a token."""
        return 2 * self.num_kv_heads * self.head_dim

    def token_bytes(self, itemsize: int) -> int:
        """Return the bytes of a token. itemsize: bytes of a number of the model's type."""
        if self.format == "model":
            return self.num_values * itemsize
        return self.code_bytes + 2 * self.num_kv_heads * SCALE_BYTES[self.format]

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of a token, where there are some."""
        return self.num_values * _CODE_BITS[self.format] // 8
