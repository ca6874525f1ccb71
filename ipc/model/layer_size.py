"""Sizes of layers and of their parts, what they keep of tokens, and what ranks share out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

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


class LayerKv(msgspec.Struct, frozen=True, kw_only=True):
    """Keys and values that one rank keeps of a token in one layer."""

    num_kv_heads: int
    head_dim: int

    @property
    def num_values(self) -> int:
        """The number of keys and values of a token."""
        return 2 * self.num_kv_heads * self.head_dim

    def token_bytes(self, itemsize: int) -> int:
        """Return the bytes of a token. itemsize: bytes of a number of the model's type."""
        return self.num_values * itemsize
