"""Specification of recurrent layers: their weights, and the state that a sequence keeps."""

from __future__ import annotations

import msgspec

from sidestep.ipc.model.layer_size import Divided, LayerSize, MatrixSize, active_numbers

CHUNK = 64
"""Tokens that prompts are computed in; each has a product with the others of its chunk."""
_FLOAT32_BYTES = 4


class DeltaSpec(msgspec.Struct, frozen=True, kw_only=True, tag="delta"):
    """The gated delta net (Yang, Kautz and Hatamizadeh 2024): linear attention that forgets.

    Queries, keys and values go through a short causal convolution. Each value head then updates a
    matrix of the key head's width by its own. The result is normed, and multiplied with a gate.
    """

    num_key_heads: int
    """Heads of queries and of keys; as many value heads share each."""
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    """Tokens that the convolution sees, the token itself included."""

    @property
    def divided(self) -> tuple[Divided, ...]:
        """Numbers that tensor-parallel ranks share out."""
        return (Divided("key heads of recurrent layers", self.num_key_heads),)

    def channels(self, num_ranks: int = 1) -> int:
        """Return the number of values of a token that one rank's convolution takes."""
        keys, values = self.num_key_heads * self.key_dim, self.num_value_heads * self.value_dim
        return (2 * keys + values) // num_ranks

    def conv_state(self, num_ranks: int = 1) -> tuple[int, int]:
        """Return the shape of one rank's last inputs of the convolution, in the model's type."""
        return self.channels(num_ranks), self.conv_kernel - 1

    def delta_state(self, num_ranks: int = 1) -> tuple[int, int, int]:
        """Return the shape of the matrices of one rank's value heads, float32."""
        return self.num_value_heads // num_ranks, self.key_dim, self.value_dim

    def state_bytes(self, itemsize: int, num_ranks: int = 1) -> int:
        """Return the size of one rank's state of a sequence. itemsize: bytes of the model's type.

        It does not grow with the sequence.
        """
        channels, kept = self.conv_state(num_ranks)
        heads, keys, values = self.delta_state(num_ranks)
        return channels * kept * itemsize + heads * keys * values * _FLOAT32_BYTES

    def size(self, hidden_size: int, num_ranks: int = 1) -> LayerSize:
        """Return the size of one rank's part. Each rank has the norm that all heads share.

        Nothing is kept of each token.
        """
        heads, channels = self.num_value_heads // num_ranks, self.channels(num_ranks)
        values = heads * self.value_dim
        matrices = self.matrices(hidden_size, num_ranks)
        # Beside projections and results, a chunk's tokens have the solutions of its system.
        in_chunks = heads * (self.key_dim + self.value_dim + CHUNK)
        return LayerSize(
            state=channels * (self.conv_kernel - 1) + values * self.key_dim,
            matrices=sum(one.numbers for one in matrices),
            active=active_numbers(matrices),
            vectors=channels * self.conv_kernel + 2 * heads + self.value_dim,
            widest=2 * channels + 2 * values + 2 * heads + in_chunks,
        )

    def matrices(self, hidden_size: int, num_ranks: int = 1) -> list[MatrixSize]:
        """Return one rank's parts of the matrices."""
        heads, own = self.num_value_heads // num_ranks, "linear_attn"
        values = heads * self.value_dim
        return [
            MatrixSize(f"{own}.in_proj_qkv", self.channels(num_ranks), hidden_size),
            MatrixSize(f"{own}.in_proj_z", values, hidden_size),
            MatrixSize(f"{own}.in_proj_b", heads, hidden_size),
            MatrixSize(f"{own}.in_proj_a", heads, hidden_size),
            MatrixSize(f"{own}.out_proj", hidden_size, values),
        ]
