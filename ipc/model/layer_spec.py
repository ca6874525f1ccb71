"""Specifications of a model's layers: what each part computes, and how large it is.

A layer is a mixer, which lets tokens see each other, and an MLP. Each part's specification knows
its numbers of parameters, the weights that a token is multiplied with, and what it keeps in the
cache. The planner (frontend/planning/topology.py), the split of layers over stages, the choice of
CUDA graphs and the workers' KV caches all count from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any, Literal

import msgspec

from sidestep.ipc.model.layer_size import (
    Divided,
    KvFormat,
    LayerKv,
    LayerSize,
    MatrixSize,
    active_numbers,
)
from sidestep.ipc.model.quantization.weight_scheme import WeightScheme
from sidestep.ipc.model.recurrent_spec import DeltaSpec

Activation = Literal["silu", "gelu_tanh"]
"""Activations of an MLP's gate, with the names of torch; gelu_tanh is its approximation by tanh."""


class ClampedSwiglu(msgspec.Struct, frozen=True, kw_only=True):
    """The activation of gpt-oss, which also adds 1: (up + 1) * gate * sigmoid(alpha * gate).

    Before it, the gate is cut to at most `limit`, and up to between -limit and limit.
    """

    alpha: float
    limit: float


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
    gate: bool = False
    """Whether the result of each head is multiplied with the sigmoid of a gate of its own.

    The q projection has the rows of a head's gate behind those of its query.
    """
    score_softcap: float | None = None
    """The bound c of the scores: a score s becomes c * tanh(s / c)."""
    sinks: bool = False
    """Whether each query head has a learnt score that only the softmax's denominator has."""
    value_norms: bool = False
    """RMSNorm without weights over each head's v."""
    keys_as_values: bool = False
    """Whether v is the result of the k projection, before its norm and the rotary embedding."""
    kv_back: int = 0
    """How many layers before this one the layer is whose keys and values this one reads.

    It has no projections of k and v then. 0 if it has keys and values of its own.
    """
    kv_format: KvFormat = "model"
    """How keys and values are kept, which the user chooses; see with_kv_cache_dtype."""
    kv_scales: bool = False
    """Whether codes take the checkpoint's scales of keys and values, where it has some."""

    @property
    def num_kv_projections(self) -> int:
        """The number of projections beside that of q."""
        return 0 if self.kv_back else 2 - self.keys_as_values

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

    def kv(self, num_ranks: int = 1) -> LayerKv:
        """Return what one rank keeps of each token, or reads of what another layer keeps."""
        return LayerKv(
            num_kv_heads=max(1, self.num_kv_heads // num_ranks),
            head_dim=self.head_dim,
            format=self.kv_format,
        )

    def size(self, hidden_size: int, num_ranks: int = 1) -> LayerSize:
        """Return the size of one rank's part."""
        dim = self.head_dim
        heads, kv_heads = self._heads(num_ranks)
        own_kv_heads = 0 if self.kv_back else kv_heads
        projected = (1 + self.gate) * heads + self.num_kv_projections * kv_heads
        matrices = self.matrices(hidden_size, num_ranks)
        return LayerSize(
            matrices=sum(one.numbers for one in matrices),
            active=active_numbers(matrices),
            vectors=self.bias * dim * projected
            + self.output_bias * hidden_size
            + (2 - bool(self.kv_back)) * dim * self.head_norms
            + heads * self.sinks
            + dim * (heads + own_kv_heads) * self.row_norms,
            kv_per_token=0 if self.kv_back else self.kv(num_ranks).num_values,
            widest=dim * (projected + heads),
        )

    def matrices(self, hidden_size: int, num_ranks: int = 1) -> list[MatrixSize]:
        """Return one rank's parts of the matrices."""
        heads, kv_heads = self._heads(num_ranks)
        rows, own = self.head_dim * heads, "self_attn"
        kv_rows = self.head_dim * kv_heads
        return [
            MatrixSize(f"{own}.q_proj", (1 + self.gate) * rows, hidden_size),
            *(
                MatrixSize(f"{own}.{one}_proj", kv_rows, hidden_size)
                for one in "kv"[: self.num_kv_projections]
            ),
            MatrixSize(f"{own}.o_proj", hidden_size, rows),
        ]

    def _heads(self, num_ranks: int) -> tuple[int, int]:
        """Return the numbers of one rank's heads, and of its KV heads."""
        return self.num_heads // num_ranks, max(1, self.num_kv_heads // num_ranks)


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
        matrices = self.matrices(hidden_size, num_ranks)
        return LayerSize(
            matrices=sum(one.numbers for one in matrices),
            active=active_numbers(matrices),
            vectors=self.bias * (2 * width + hidden_size),
            widest=3 * width,
        )

    def matrices(self, hidden_size: int, num_ranks: int = 1) -> list[MatrixSize]:
        """Return one rank's parts of the matrices."""
        return gated_mlp("mlp", self.width // num_ranks, hidden_size)


def gated_mlp(
    name: str,
    width: int,
    hidden_size: int,
    parts: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
    **common: Any,
) -> list[MatrixSize]:
    """Return the matrices of a gated MLP.

    parts: names of the gate's, the other's and the last one. common: fields of MatrixSize.
    """
    shapes = (width, hidden_size), (width, hidden_size), (hidden_size, width)
    return [
        MatrixSize(f"{name}.{part}", *shape, **common)
        for part, shape in zip(parts, shapes, strict=True)
    ]


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
    product_bias: bool = False
    """Whether the router's product has a bias."""
    groups: int = 1
    """Groups of neighbouring experts, with as many experts each."""
    chosen_groups: int = 1
    """Groups from which experts are chosen: those whose two largest scores have the largest sum."""
    norm: bool = False
    """Whether the router takes the residual stream, and norms it: weights in the checkpoint, over
    the square root of the hidden size."""
    expert_scales: bool = False
    """Whether each expert has a factor in the checkpoint, on the weights of its results."""


ExpertStorage = Literal["apart", "interleaved", "mxfp4"]
"""How a checkpoint stores the matrices of experts.

apart: each under its own name. interleaved: one tensor for all experts' `gate_up_proj` [E, D, 2 F],
whose columns are those of gate and up in turns, and one for `down_proj` [E, F, D]. mxfp4: the same,
transposed, in blocks of 32 numbers of four bits (see kernels/experts/expert_matrix.py).
"""
MXFP4_BLOCK = 32
"""Numbers of a block of MXFP4, along the inputs of a product."""


class ExpertNames(msgspec.Struct, frozen=True, kw_only=True):
    """Names in the checkpoint of a layer's experts, with `layer`.`router`, `layer`.experts.0.`up`.

    Experts that are not stored apart have no names of their own.
    """

    layer: str = "mlp"
    """Empty if the parts are the layer's own."""
    packed: str = "mlp"
    """The place of `layer` in checkpoints that have all experts in one tensor."""
    router: str = "gate"
    router_norm: str = "router.scale"
    expert_scales: str = "router.per_expert_scale"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_expert"

    def place(self, layer: str) -> str:
        """Return the beginning of the names of a layer's parts. layer: that of the layer's."""
        return f"{layer}.{self.layer}" if self.layer else layer


class ExpertNorms(msgspec.Struct, frozen=True, kw_only=True):
    """Names of the norms of experts and of a shared expert that are normed apart, before their sum.

    The shared expert takes the norm before the MLP.
    """

    before: str = "pre_feedforward_layernorm_2"
    """The norm of the residual stream, which the experts take."""
    after: str = "post_feedforward_layernorm_2"
    """The norm of the experts' results."""
    after_shared: str = "post_feedforward_layernorm_1"
    """The norm of the shared expert's result."""


class ExpertsSpec(msgspec.Struct, frozen=True, kw_only=True, tag="experts"):
    """A mixture of experts: gated MLPs, some of which a router chooses by token.

    The shared expert takes every token. With a gate of its own, its result is multiplied with the
    sigmoid of a product of the token.
    """

    num_experts: int
    num_chosen: int
    """Experts that a token is multiplied with, without the shared one."""
    width: int
    """Intermediate size of each expert."""
    activation: Activation | ClampedSwiglu = "silu"
    bias: bool = False
    """Bias on the products of each expert, which is not stored apart then."""
    stored: ExpertStorage = "apart"
    routing: RoutingSpec = RoutingSpec()
    shared_width: int = 0
    """Intermediate size of the shared expert; 0 for none."""
    shared_gate: bool = False
    whole: bool = False
    """Whether a tensor-parallel rank has some whole experts, rather than a part of each."""
    norms: ExpertNorms | None = None
    """The norms of the experts and of the shared one; None if they have the layer's in common."""
    names: ExpertNames = ExpertNames()

    @property
    def divided(self) -> tuple[Divided, ...]:
        """Numbers that tensor-parallel ranks share out."""
        own = Divided("intermediate size of an expert", self.width)
        if self.whole:
            own = Divided("experts", self.num_experts)
        elif self.stored == "mxfp4":
            name = f"blocks of {MXFP4_BLOCK} of an expert's intermediate size"
            own = Divided(name, self.width // MXFP4_BLOCK)
        shared = Divided("intermediate size of the shared expert", self.shared_width)
        return (own, shared) if self.shared_width else (own,)

    def size(self, hidden_size: int, num_ranks: int = 1) -> LayerSize:
        """Return the size of one rank's part. Each rank has the whole router.

        The active ones of whole experts are those that a token has on a rank on average.
        """
        width = self.width if self.whole else self.width // num_ranks
        shared = self.shared_width // num_ranks
        matrices = self.matrices(hidden_size, num_ranks)
        routing, experts = self.routing, self.num_experts
        # Where ranks have parts of experts, each of them has the last bias.
        last_biases = experts // num_ranks if self.whole else experts
        biases = experts * 2 * self.width // num_ranks + last_biases * hidden_size
        return LayerSize(
            matrices=sum(one.numbers for one in matrices),
            active=active_numbers(matrices),
            vectors=experts * (routing.bias + routing.product_bias + routing.expert_scales)
            + hidden_size * (routing.norm + 3 * (self.norms is not None))
            + self.bias * biases,
            widest=self.num_chosen * (3 * width + hidden_size) + 3 * shared,
        )

    def matrices(self, hidden_size: int, num_ranks: int = 1) -> list[MatrixSize]:
        """Return one rank's parts of the matrices; the names are those of the first expert."""
        own = f"{self.names.layer}." if self.names.layer else ""
        experts = self.num_experts
        packed = WeightScheme(kind="fp4", columns=MXFP4_BLOCK, scale_bytes=1)
        found = [
            MatrixSize(f"{own}{self.names.router}", experts, hidden_size, may_be_coded=False),
            *gated_mlp(
                f"{own}experts.0",
                self.width if self.whole else self.width // num_ranks,
                hidden_size,
                (self.names.gate, self.names.up, self.names.down),
                count=experts // num_ranks if self.whole else experts,
                active=Fraction(self.num_chosen, experts),
                scheme=packed if self.stored == "mxfp4" else None,
            ),
        ]
        if self.shared_width:
            name = f"{own}{self.names.shared}"
            found += gated_mlp(name, self.shared_width // num_ranks, hidden_size)
        if self.shared_gate:
            found.append(MatrixSize(f"{own}{self.names.shared}_gate", 1, hidden_size))
        return found


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


class TokenInputSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A vector of each token for each layer, from a table and from the token's embedding.

    Behind its MLP, a layer adds norm(projection(act(gate(stream)) * vector)). Each rank has the
    whole matrices, and a part of the table.
    """

    width: int
    """Values of a vector."""
    vocab_size: int
    """Rows of the table."""
    activation: Activation = "silu"

    def size(self, hidden_size: int) -> LayerSize:
        """Return the size of the part that a layer has."""
        matrices = active_numbers(self.matrices(hidden_size))
        return LayerSize(
            matrices=matrices, active=matrices, vectors=hidden_size, widest=3 * self.width
        )

    def matrices(self, hidden_size: int) -> list[MatrixSize]:
        """Return the matrices of a layer, which each rank has."""
        return [
            MatrixSize("per_layer_input_gate", self.width, hidden_size),
            MatrixSize("per_layer_projection", hidden_size, self.width),
        ]

    def common_size(self, hidden_size: int, num_layers: int, num_ranks: int = 1) -> LayerSize:
        """Return the size of the part that no layer has: the table, a projection and a norm.

        The table's rows are padded to a multiple of the ranks, which share them out.
        """
        values = num_layers * self.width
        projection = values * hidden_size
        return LayerSize(
            matrices=projection + -(-self.vocab_size // num_ranks) * values,
            active=projection,
            vectors=self.width,
            widest=3 * values,
        )


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One layer: a mixer, and an MLP or experts, which add to the residual stream."""

    mixer: AttentionSpec | DeltaSpec
    mlp: MlpSpec | ExpertsSpec
    norms: LayerNorms = USUAL_NORMS
    token_input: TokenInputSpec | None = None
    """The vectors of its own that the layer takes; alike in the whole model."""
    stored_factor: bool = False
    """Whether the residual stream behind the layer is multiplied with a number of the checkpoint,
    `layer_scalar`."""

    @property
    def divided(self) -> tuple[Divided, ...]:
        """Numbers that tensor-parallel ranks share out."""
        return (*self.mixer.divided, *self.mlp.divided)

    def size(self, hidden_size: int, num_ranks: int = 1) -> LayerSize:
        """Return the size of the part that one of `num_ranks` tensor-parallel ranks has.

        Norms are counted on every rank, since every rank has them. So are the biases of projections
        to the residual stream.
        """
        parts = [
            self.mixer.size(hidden_size, num_ranks),
            self.mlp.size(hidden_size, num_ranks),
            LayerSize(vectors=self.norms.count * hidden_size + self.stored_factor),
        ]
        if self.token_input is not None:
            parts.append(self.token_input.size(hidden_size))
        return sum(parts, LayerSize())

    def matrices(self, hidden_size: int, num_ranks: int = 1) -> list[MatrixSize]:
        """Return the matrices of products of that part."""
        mixer, mlp = (one.matrices(hidden_size, num_ranks) for one in (self.mixer, self.mlp))
        inputs = [] if self.token_input is None else self.token_input.matrices(hidden_size)
        return mixer + mlp + inputs


def attention_of(layers: Iterable[LayerSpec]) -> list[AttentionSpec]:
    """Return the mixers of those layers that have attention, in the order of the layers."""
    return [layer.mixer for layer in layers if isinstance(layer.mixer, AttentionSpec)]


def experts_of(layers: Iterable[LayerSpec]) -> list[ExpertsSpec]:
    """Return the experts of those layers that have some, in the order of the layers."""
    return [layer.mlp for layer in layers if isinstance(layer.mlp, ExpertsSpec)]


def recurrent_of(layers: Iterable[LayerSpec]) -> list[DeltaSpec]:
    """Return the mixers of those layers that are recurrent, in the order of the layers."""
    return [layer.mixer for layer in layers if isinstance(layer.mixer, DeltaSpec)]
