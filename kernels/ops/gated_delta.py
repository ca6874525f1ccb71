"""The gated delta rule (Yang, Kautz and Hatamizadeh 2024), the recurrence of linear attention.

Each value head keeps a matrix S [Dk, Dv] that maps keys to values. A token with decay d, write
strength b, key k, value v and query q does

    S <- d S;  S <- S + b k (v - k^T S)^T;  output = S^T q

with k and q of length one, and q divided by sqrt(Dk). Rows of few tokens are computed so. Longer
rows are computed in chunks: within a chunk, the values that each token writes solve a triangular
system (the WY form of Bischof and Van Loan 1987), and only then S is read and written once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sidestep.kernels.gpu import on_gpu
from sidestep.kernels.native.recurrent import NativeDelta
from sidestep.kernels.ops.causal_conv import causal_conv
from sidestep.kernels.ops.rms_norm import gated_rms_norm
from sidestep.kernels.ops.silu_mul import each_row, row_sigmoid
from sidestep.kernels.recurrent.delta_parts import DeltaWeights, Projected
from sidestep.kernels.recurrent.state_rows import (
    CHUNK,
    FEW_TOKENS,
    StateRow,
    StateRows,
    rows_on_host,
)

NORM_EPS = 1e-6
"""Added to the square of the length of queries and keys."""


@dataclass(frozen=True)
class Decay:
    """The weights of the decay exp(-exp(a_log) softplus(a + bias)), float32 [Hv]."""

    a_log: Tensor
    bias: Tensor


def delta_net(
    projected: Projected,
    weights: DeltaWeights,
    conv: Tensor,
    state: Tensor,
    rows: StateRows,
    native: NativeDelta | None = None,
) -> Tensor:
    """Return the results [T, Hv * Dv] of a gated delta net between its projections.

    They are the convolution, the delta rule, and its gated norm. conv [N, C, K - 1], in the
    projections' type, and state float32 [N, Hv, Dk, Dv] are updated as `rows` says. native: the
    same weights for kernels in C, on a CPU that has them.
    """
    if on_gpu(projected.qkv):
        from sidestep.kernels.recurrent.delta_net_triton import delta_net as launch

        return launch(projected, weights, conv, state, rows, NORM_EPS)
    decay = Decay(weights.a_log, weights.bias)
    if native is not None:
        described = rows.in_c()
        qkv = native.convolved(projected.qkv, conv, described)
        mixed = native.delta_of_few(qkv, projected.ba, state, NORM_EPS, described)
        if rows.max_long_rows:
            _write_long(mixed, qkv, projected.ba, decay, state, rows)
        return native.normed(mixed, projected.gate)
    qkv = causal_conv(projected.qkv, weights.conv, conv, rows)
    mixed = gated_delta(qkv, projected.ba, decay, state, rows)
    return gated_rms_norm(mixed, weights.norm, projected.gate, weights.norm_eps)


def gated_delta(qkv: Tensor, ba: Tensor, decay: Decay, state: Tensor, rows: StateRows) -> Tensor:
    """Return the outputs [T, Hv * Dv] in qkv's type.

    qkv [T, 2 Hk Dk + Hv Dv]: queries and keys of the key heads, then values; consecutive value
    heads share a key head. ba [T, 2 Hv]: of each value head, the logit of the write strength, and
    behind all of those the input of the decay. state float32 [N, Hv, Dk, Dv], updated as `rows`
    says. All is computed in float32.
    """
    tokens = _Tokens.of(qkv, ba, decay, state)
    out = qkv.new_zeros(len(qkv), state.shape[1] * state.shape[3])
    for row in rows_on_host(rows):
        compute = _one_by_one if row.num_tokens <= FEW_TOKENS else _in_chunks
        own, before = tokens.part(row.tokens), _state_before(row, state)
        out[row.tokens] = compute(own, before, row, state).flatten(1)
    return out


def _write_long(
    out: Tensor, qkv: Tensor, ba: Tensor, decay: Decay, state: Tensor, rows: StateRows
) -> None:
    """Write the outputs of rows with more than FEW_TOKENS. See `gated_delta`."""
    for row in rows_on_host(rows):
        if row.num_tokens > FEW_TOKENS:
            own = _Tokens.of(qkv[row.tokens], ba[row.tokens], decay, state)
            made = _in_chunks(own, _state_before(row, state), row, state)
            out[row.tokens] = made.flatten(1)


def _state_before(row: StateRow, state: Tensor) -> Tensor:
    """Return a copy of the state that a row begins from, [Hv, Dk, Dv]."""
    return torch.zeros_like(state[0]) if row.state_in < 0 else state[row.state_in].clone()


@dataclass(frozen=True)
class _Tokens:
    """The keys, values and gates of some tokens, float32."""

    q: Tensor
    """[T, Hv, Dk]"""
    k: Tensor
    """[T, Hv, Dk]"""
    v: Tensor
    """[T, Hv, Dv]"""
    strength: Tensor
    """[T, Hv] Parts of the way to the new value, from 0 to 1."""
    log_decay: Tensor
    """[T, Hv]"""

    @classmethod
    def of(cls, qkv: Tensor, ba: Tensor, decay: Decay, state: Tensor) -> _Tokens:
        """Return them, from projections. The bits of a token depend on that token alone."""
        _, heads, key_dim, value_dim = state.shape
        keys = (qkv.shape[1] - heads * value_dim) // 2
        wide, gates = qkv.float(), ba.float()
        q, k = (
            _unit(part.unflatten(1, (-1, key_dim))).repeat_interleave(heads * key_dim // keys, 1)
            for part in (wide[:, :keys], wide[:, keys : 2 * keys])
        )
        speed = each_row(torch.ops.aten.softplus.out, gates[:, heads:] + decay.bias)
        return cls(
            q * key_dim**-0.5,
            k,
            wide[:, 2 * keys :].unflatten(1, (heads, value_dim)),
            row_sigmoid(gates[:, :heads]),
            -decay.a_log.exp() * speed,
        )

    def part(self, tokens: slice) -> _Tokens:
        """Return some of the tokens."""
        return _Tokens(
            self.q[tokens],
            self.k[tokens],
            self.v[tokens],
            self.strength[tokens],
            self.log_decay[tokens],
        )


def _unit(x: Tensor) -> Tensor:
    """Return x [.., D] with length one."""
    norm = torch.linalg.vector_norm(x, 2, -1, True)
    return x * (norm * norm + NORM_EPS).rsqrt()


def _one_by_one(tokens: _Tokens, memory: Tensor, row: StateRow, state: Tensor) -> Tensor:
    """Return the outputs [n, Hv, Dv] of a row, and write its states.

    memory [Hv, Dk, Dv]: its state before, which is written over.
    """
    kept = each_row(torch.ops.aten.exp.out, tokens.log_decay)
    out = torch.empty_like(tokens.v)
    for i in range(row.num_tokens):
        k, v, strength = tokens.k[i], tokens.v[i], tokens.strength[i]
        memory *= kept[i, :, None, None]
        known = torch.bmm(k[:, None], memory)
        memory.baddbmm_(k[:, :, None], (v[:, None] - known) * strength[:, None, None])
        out[i] = torch.bmm(tokens.q[i, :, None], memory)[:, 0]
        for offset, target in row.saves:
            if offset == i + 1:
                state[target] = memory
    return out


def _in_chunks(tokens: _Tokens, memory: Tensor, row: StateRow, state: Tensor) -> Tensor:
    """Return the same as `_one_by_one`, by chunks of CHUNK tokens."""
    q, k, v, strength, log_decay = (
        _cut(x) for x in (tokens.q, tokens.k, tokens.v, tokens.strength, tokens.log_decay)
    )
    total = log_decay.cumsum(2)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    # The part of what token j wrote that is left at token i; exp must not overflow for j > i.
    left = (total[..., :, None] - total[..., None, :]).masked_fill_(later, -torch.inf).exp_()
    system = (k * strength[..., None]) @ k.mT * left
    written, read = (
        torch.linalg.solve_triangular(
            system, x * strength[..., None], upper=False, unitriangular=True
        )
        for x in (v, k * total.exp()[..., None])
    )
    attention = q @ k.mT * left
    out = torch.empty_like(v)
    for i in range(q.shape[1]):
        new = written[:, i] - read[:, i] @ memory
        from_before = (q[:, i] * total[:, i].exp()[..., None]) @ memory
        out[:, i] = from_before + attention[:, i] @ new
        for offset, target in row.saves:
            if 0 < (count := offset - i * CHUNK) <= CHUNK:
                state[target] = _memory_after(count, memory, k[:, i], new, total[:, i])
        memory = _memory_after(CHUNK, memory, k[:, i], new, total[:, i])
    return out.flatten(1, 2)[:, : row.num_tokens].transpose(0, 1)


def _cut(x: Tensor) -> Tensor:
    """Return x [n, H, ..] by head and chunk, [H, chunks, CHUNK, ..], filled up with zeros."""
    padding = -len(x) % CHUNK
    filled = torch.cat([x, x.new_zeros(padding, *x.shape[1:])]) if padding else x
    return filled.transpose(0, 1).unflatten(1, (-1, CHUNK)).contiguous()


def _memory_after(count: int, memory: Tensor, k: Tensor, new: Tensor, total: Tensor) -> Tensor:
    """Return the state after some tokens of a chunk, [Hv, Dk, Dv].

    memory: the state before the chunk. k, new [Hv, CHUNK, ..]: keys, and the values that the tokens
    write. total [Hv, CHUNK]: sums of logarithms of the decay.
    """
    last = total[:, count - 1, None]
    left = (last - total[:, :count]).exp()[..., None]
    return memory * last.exp()[..., None] + (k[:, :count] * left).mT @ new[:, :count]
