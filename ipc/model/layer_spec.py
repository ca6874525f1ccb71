"""Specifications of a model's layers: what each part computes, and how large it is.

A layer is a mixer, which lets tokens see each other, and an MLP. Each part's specification knows
its numbers of parameters, the weights that a token is multiplied with, and what it keeps in the
cache. The planner (frontend/planning/topology.py), the split of layers over stages, the choice of
CUDA graphs and the workers' KV caches all count from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec


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
            widest=max(self.widest, other.widest),
        )


Activation = Literal["silu", "gelu_tanh"]
"""Activations of an MLP's gate, with the names of torch; gelu_tanh is its approximation by tanh."""


class Divided(msgspec.Struct, frozen=True):
    """A number that tensor-parallel ranks share out."""

    name: str
    count: int
    may_repeat: bool = False
    """Whether several ranks may have the same one, where there are fewer than ranks."""

    def fits(self, num_ranks: int) -> bool:
        """Return whether that many ranks can share it out."""
        return self.count % num_ranks == 0 or (self.may_repeat and num_ranks % self.count == 0)


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding: base and scaling, with the names of config.json."""

    theta: float
    rope_type: str = "default"
    scaling: dict[str, Any] = {}
    """The type's values by their names in rope_parameters, such as factor or low_freq_factor.

    All required ones are there.
    """
    dims: int | None = None
    """Values of each head that are rotated, its first ones; None for all."""
    interleaved: bool = False
    """Whether a pair is two neighbours, rather than two values half of `dims` apart."""


class AttentionSpec(msgspec.Struct, frozen=True, kw_only=True, tag="attention"):
    """Causal self-attention with grouped queries."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec | None
    """None where positions do not count."""
    window: int = 0
    """Tokens that a token attends to, itself included; 0 for all."""
    bias: bool = False
    """Bias on the q, k and v projections."""
    output_bias: bool = False
    """Bias on the output projection."""
    head_norms: bool = False
    """RMSNorm over each head's q and k before the rotary embedding."""
    row_norms: bool = False
    """RMSNorm over the q of all heads together, and over their k, before the rotary embedding."""
    given_scale: float | None = None
    """The scale, if it is not the usual one."""

    @property
    def scale(self) -> float:
        """The factor on the products of queries and keys: 1 / sqrt(D) unless another is given."""
        return float(self.head_dim**-0.5) if self.given_scale is None else self.given_scale

    @property
    def divided(self) -> tuple[Divided, ...]:
        """Numbers that tensor-parallel ranks share out."""
        return (
            Divided("attention heads", self.num_heads),
            Divided("KV heads", self.num_kv_heads, may_repeat=True),
        )

    def size(self, hidden_size: int, num_ranks: int = 1) -> LayerSize:
        """Return the size of one rank's part."""
        dim = self.head_dim
        heads, kv_heads = self.num_heads // num_ranks, max(1, self.num_kv_heads // num_ranks)
        matrices = hidden_size * dim * (2 * heads + 2 * kv_heads)
        return LayerSize(
            matrices=matrices,
            active=matrices,
            vectors=self.bias * dim * (heads + 2 * kv_heads)
            + self.output_bias * hidden_size
            + 2 * dim * self.head_norms
            + dim * (heads + kv_heads) * self.row_norms,
            kv_per_token=kv_per_token(kv_heads, dim),
            widest=dim * (2 * heads + 2 * kv_heads),
        )


def kv_per_token(num_kv_heads: int, head_dim: int) -> int:
    """Return the number of values that a token has in one layer's cache."""
    return 2 * num_kv_heads * head_dim


class MlpSpec(msgspec.Struct, frozen=True, kw_only=True, tag="mlp"):
    """A gated MLP: down(act(gate x) * up x)."""

    width: int
    bias: bool = False
    activation: Activation = "silu"

    @property
    def divided(self) -> tuple[Divided, ...]:
        """Numbers that tensor-parallel ranks share out."""
        return (Divided("intermediate size", self.width),)

    def size(self, hidden_size: int, num_ranks: int = 1) -> LayerSize:
        """Return the size of one rank's part."""
        width = self.width // num_ranks
        matrices = 3 * hidden_size * width
        return LayerSize(
            matrices=matrices,
            active=matrices,
            vectors=self.bias * (2 * width + hidden_size),
            widest=3 * width,
        )


class RoutingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How a router chooses a token's experts, and the weights of their results.

    The router's product, one number for each expert, becomes scores. The experts with the largest
    scores are chosen. A softmax over the chosen experts alone is the normalised one over all.
    """

    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = False
    """Whether the chosen scores are divided by their sum."""
    scale: float = 1.0
    """Factor on the weights."""
    bias: bool = False
    """Whether a bias of each expert is added to the scores, for the choice alone."""
    groups: int = 1
    """Groups of neighbouring experts, with as many experts each."""
    chosen_groups: int = 1
    """Groups from which experts are chosen: those whose two largest scores have the largest sum."""


class ExpertNames(msgspec.Struct, frozen=True, kw_only=True):
    """Names in the checkpoint of a layer's experts, from `layer`.gate to `layer`.experts.0.`up`."""

    layer: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_expert"


class ExpertsSpec(msgspec.Struct, frozen=True, kw_only=True, tag="experts"):
    """A mixture of experts: gated MLPs without biases, some of which a router chooses by token.

    The shared expert takes every token. With a gate of its own, its result is multiplied with the
    sigmoid of a product of the token.
    """

    num_experts: int
    num_chosen: int
    """Experts that a token is multiplied with, without the shared one."""
    width: int
    """Intermediate size of each expert."""
    activation: Activation = "silu"
    routing: RoutingSpec = RoutingSpec()
    shared_width: int = 0
    """Intermediate size of the shared expert; 0 for none."""
    shared_gate: bool = False
    names: ExpertNames = ExpertNames()

    @property
    def divided(self) -> tuple[Divided, ...]:
        """Numbers that tensor-parallel ranks share out."""
        own = Divided("intermediate size of an expert", self.width)
        shared = Divided("intermediate size of the shared expert", self.shared_width)
        return (own, shared) if self.shared_width else (own,)

    def size(self, hidden_size: int, num_ranks: int = 1) -> LayerSize:
        """Return the size of one rank's part. Each rank has the whole router."""
        width, shared = self.width // num_ranks, self.shared_width // num_ranks
        common = hidden_size * (self.num_experts + 3 * shared + self.shared_gate)
        expert = 3 * hidden_size * width
        return LayerSize(
            matrices=common + self.num_experts * expert,
            active=common + self.num_chosen * expert,
            vectors=self.routing.bias * self.num_experts,
            widest=self.num_chosen * (3 * width + hidden_size) + 3 * shared,
        )


class NormSpec(msgspec.Struct, frozen=True, kw_only=True):
    """RMSNorm, alike in the whole model."""

    eps: float
    """Added to the mean square."""
    offset: float = 0.0
    """Added to the checkpoint's weights."""


class LayerNorms(msgspec.Struct, frozen=True, kw_only=True):
    """Names in the checkpoint of a layer's norms; an empty one where there is no norm.

    A part x of the layer adds after(x(before(stream))) to the residual stream.
    """

    before_mixer: str = "input_layernorm"
    after_mixer: str = ""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""

    @property
    def count(self) -> int:
        """The number of norms."""
        names = (self.before_mixer, self.after_mixer, self.before_mlp, self.after_mlp)
        return sum(name != "" for name in names)


USUAL_NORMS = LayerNorms()
"""The norms of Llama's layers."""


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One layer: a mixer, and an MLP or experts, which add to the residual stream."""

    mixer: AttentionSpec
    mlp: MlpSpec | ExpertsSpec
    norms: LayerNorms = USUAL_NORMS

    @property
    def divided(self) -> tuple[Divided, ...]:
        """Numbers that tensor-parallel ranks share out."""
        return (*self.mixer.divided, *self.mlp.divided)

    def size(self, hidden_size: int, num_ranks: int = 1) -> LayerSize:
        """Return the size of the part that one of `num_ranks` tensor-parallel ranks has.

        Norms are counted on every rank, since every rank has them. So are the biases of projections
        to the residual stream.
        """
        norms = LayerSize(vectors=self.norms.count * hidden_size)
        return (
            self.mixer.size(hidden_size, num_ranks) + self.mlp.size(hidden_size, num_ranks) + norms
        )
