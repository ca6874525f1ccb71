"""The decoder that all families share; ModelSpec says what its layers are.

Weights are pulled by their checkpoint names while the layers are built, each rank its own part
(Megatron's layout: attention by heads, the MLP by its inner width, two all-reduces a layer). In a
pipeline, a stage builds its own layers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor

from sidestep.executor.attention.base import (
    Attends,
    AttentionBackend,
    AttentionShape,
    Heads,
    SplitStep,
)
from sidestep.executor.layers.attention import Attention
from sidestep.executor.layers.experts.layer import Experts
from sidestep.executor.layers.gated_delta import GatedDeltaNet, RecurrentStep
from sidestep.executor.layers.mlp import Mlp
from sidestep.executor.layers.norms import load_norm
from sidestep.executor.layers.token_inputs import TokenInput, load_token_inputs
from sidestep.executor.layers.vocab import (
    VocabParallelEmbedding,
    VocabParallelHead,
    head_shard,
    rounded_head,
    vocab_shard,
)
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.weights.weight_loader import Matrix, Weights
from sidestep.ipc.model.cache_groups import cache_groups, kv_sources, layer_places
from sidestep.ipc.model.layer_spec import (
    AttentionSpec,
    LayerSpec,
    MlpSpec,
    RopeSpec,
    attention_of,
)
from sidestep.ipc.model.layer_split import Stage, stage_of
from sidestep.ipc.model.model_spec import ModelSpec
from sidestep.ipc.model.recurrent_spec import DeltaSpec
from sidestep.kernels.gpu import on_gpu
from sidestep.kernels.ops.rms_norm import NoNorm, RmsNorm, Stream, scale


def attention_shape(
    spec: ModelSpec, parallel: Parallel, stage: Stage, max_model_len: int | None = None
) -> AttentionShape:
    """Return the sizes of one rank's part of the stage's attention.

    max_model_len: tokens of the longest request; None for the most that the model takes.
    """
    longest = spec.max_position_embeddings if max_model_len is None else max_model_len
    groups = cache_groups(spec.layers, longest)
    own = layers_of(spec, stage)
    mixers, sources = attention_of(own), kv_sources(own)
    ropes, shares = distinct_ropes(mixers), sources != tuple(range(len(mixers)))
    heads = [heads_of(mixer, parallel) for mixer in mixers or attention_of(spec.layers)[:1]]
    return AttentionShape(
        num_layers=len(mixers),
        num_heads=heads[0].num_heads,
        num_kv_heads=heads[0].num_kv_heads,
        head_dim=heads[0].head_dim,
        heads=tuple(heads) if len(set(heads)) > 1 else (),
        windows=tuple(mixer.window for mixer in mixers),
        scales=tuple(mixer.scale for mixer in mixers),
        softcaps=tuple(mixer.score_softcap for mixer in mixers),
        has_sinks=any(mixer.sinks for mixer in mixers),
        tables=tuple(ropes.index((mixer.rope, mixer.head_dim)) for mixer in mixers),
        places=layer_places(own, groups, longest) if groups.windows or shares else (),
        sources=sources if shares else (),
        kept=tuple(mixer.kv(parallel.size) for mixer in mixers),
    )


def heads_of(mixer: AttentionSpec, parallel: Parallel) -> Heads:
    """Return the heads of a layer on this rank."""
    kv_heads = parallel.kv_heads(mixer.num_kv_heads)
    return Heads(len(parallel.share(mixer.num_heads)), len(kv_heads), mixer.head_dim)


def distinct_ropes(mixers: Sequence[AttentionSpec]) -> list[tuple[RopeSpec | None, int]]:
    """Return the rotary embeddings of some layers, each once, in the order of their layers.

    Each comes with the size of the heads that it rotates.
    """
    found: list[tuple[RopeSpec | None, int]] = []
    for mixer in mixers:
        if (mixer.rope, mixer.head_dim) not in found:
            found.append((mixer.rope, mixer.head_dim))
    return found


def layers_of(spec: ModelSpec, stage: Stage) -> tuple[LayerSpec, ...]:
    """Return the specifications of a stage's layers."""
    return spec.layers[stage.layers.start : stage.layers.stop]


def first_of_each(parts: Sequence[Hashable]) -> list[int]:
    """Return where each of these is for the first time."""
    return [i for i, part in enumerate(parts) if part not in parts[:i]]


def places_by_kind(kinds: Sequence[Hashable]) -> list[int]:
    """Return how many of the same kind there are before each of these."""
    return [kinds[:i].count(kind) for i, kind in enumerate(kinds)]


def kernels_of(mixer: AttentionSpec | DeltaSpec) -> Hashable:
    """Return what tells apart mixers of one model that need different kernels."""
    if not isinstance(mixer, AttentionSpec):
        return mixer
    heads = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
    kept = mixer.kv_format, mixer.kv_scales
    return heads, kept, mixer.window, mixer.score_softcap, mixer.sinks, mixer.kv_back > 0


def kinds_of(layers: Sequence[LayerSpec]) -> list[Hashable]:
    """Return what tells which kernels each layer needs: its mixer, the one behind it, its MLP."""
    mixers = [*(kernels_of(layer.mixer) for layer in layers), None]
    return [(*kinds, layer.mlp) for kinds, layer in zip(pairwise(mixers), layers, strict=True)]


def weights_elsewhere(spec: ModelSpec, stage: Stage) -> list[str]:
    """Return how the names of weights begin that only other stages need, or none."""
    every = range(spec.num_layers + spec.unused_layers)
    names = [f"model.layers.{i}." for i in every if i not in stage.layers]
    if not stage.is_first:
        names.append("model.embed_tokens.")
    if not stage.is_last:
        names += ["model.norm.", "lm_head.", "score."]
    if spec.pooling is not None:
        names.append("lm_head.")
    return names


def hidden_norm(spec: ModelSpec, weights: Weights, name: str) -> RmsNorm:
    """Return a norm of the residual stream."""
    return load_norm(spec.norm, weights, f"{name}.weight", spec.hidden_size)


def norm_before(spec: ModelSpec, weights: Weights, layer: str, name: str) -> RmsNorm:
    """Return the norm of the stream before a part of a layer, which is none for an empty name."""
    if name:
        return hidden_norm(spec, weights, f"{layer}.{name}")
    return NoNorm(torch.ones(spec.hidden_size, dtype=weights.dtype, device=weights.device), 0.0)


def score_weight(spec: ModelSpec, weights: Weights) -> Tensor | None:
    """Return the matrix [W, D] of the head that classifies; None for a model without one."""
    pooling, size = spec.pooling, (spec.vocab_size, spec.hidden_size)
    if pooling is None or not pooling.has_head:
        return None
    if not pooling.head_token_ids:
        return weights.get("score.weight", (pooling.width, spec.hidden_size))
    # The softmax over the logits of two tokens is the sigmoid of their difference.
    name = "model.embed_tokens.weight" if spec.tie_word_embeddings else "lm_head.weight"
    no, yes = (weights.get(name, size, rows=range(i, i + 1)) for i in pooling.head_token_ids)
    return (yes - no) * spec.logits_scale


class Layer:
    """One decoder layer.

    Both halves take the residual stream [T, D], which they may write over, and return it with their
    part added, on its way through the norm that comes after them.

    following: the norm after the layer, which is the next layer's first norm or the model's last.
    local_index: index among the layers of this rank that have the same kind of mixer.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        index: int,
        local_index: int,
        following: RmsNorm,
        parallel: Parallel,
    ) -> None:
        name = f"model.layers.{index}"
        self._local_index = local_index
        layer, width = spec.layers[index], spec.hidden_size

        def norm_after(own_name: str) -> RmsNorm | None:
            return hidden_norm(spec, weights, f"{name}.{own_name}") if own_name else None

        between = norm_before(spec, weights, name, layer.norms.before_mlp)
        after = norm_after(layer.norms.after_mixer)
        self._mixer: Attention | GatedDeltaNet
        if isinstance(layer.mixer, AttentionSpec):
            own = f"{name}.self_attn"
            self._mixer = Attention(
                layer.mixer,
                width,
                weights,
                own,
                between,
                parallel,
                norm_spec=spec.norm,
                after=after,
            )
        else:
            own, eps = f"{name}.linear_attn", spec.norm.eps
            self._mixer = GatedDeltaNet(
                layer.mixer, width, weights, own, between, parallel, norm_eps=eps, after=after
            )
        after = norm_after(layer.norms.after_mlp)
        self._mlp = (
            Mlp(layer.mlp, width, weights, f"{name}.mlp", following, parallel, after)
            if isinstance(layer.mlp, MlpSpec)
            else Experts(
                layer.mlp, width, weights, name, following, parallel, after, norm_spec=spec.norm
            )
        )
        self._token_input = (
            None
            if layer.token_input is None
            else TokenInput(layer.token_input, width, weights, name, spec.norm)
        )
        self._factor = None
        if layer.stored_factor:
            factor = weights.get(f"{name}.layer_scalar", (1,))
            self._factor = factor if on_gpu(factor) else factor.float()

    def precede(self, following: Layer) -> None:
        """Take the layer behind this one, whose first product experts may compute."""
        product = following._mixer.first_product
        same = self._token_input is None and self._factor is None
        if isinstance(self._mlp, Experts) and product is not None and same:
            self._mlp.precede(product)

    @property
    def may_split(self) -> bool:
        """Whether its attention and its products may run apart, on some of the processors each."""
        plain = self._token_input is None and self._factor is None
        return (
            plain
            and isinstance(self._mixer, Attention)
            and isinstance(self._mlp, Mlp)
            and self._mixer.may_share
            and self._mlp.may_share
        )

    def attend(self, stream: Stream, attention: Attends) -> Tensor:
        """Return the heads' results [T, H * D] of a layer that may be split."""
        assert isinstance(self._mixer, Attention)
        return self._mixer.attended(stream, self._local_index, attention)

    def finish(self, stream: Stream, attended: Tensor) -> Stream:
        """Return the stream, which is added to in place, behind a layer that may be split."""
        assert isinstance(self._mixer, Attention)
        return self._mlp(self._mixer.add(stream, attended))

    def warm_up(self, stream: Stream) -> None:
        """Run the products alone."""
        made = self._mlp(self._mixer.warm_up(stream))
        if self._token_input is not None:
            self._token_input.warm_up(made)

    def __call__(
        self,
        stream: Stream,
        attention: AttentionBackend,
        rows: Tensor | None = None,
        recurrent: RecurrentStep | None = None,
        inputs: Tensor | None = None,
    ) -> Stream:
        """Return the stream after this layer.

        rows: tokens of which more is needed than their keys and values, or than the states after
        them (int [R]; None for all). recurrent: the states, if the model has recurrent layers.
        inputs [T, P]: the layer's own vectors of the tokens, if it takes any.
        """
        if isinstance(self._mixer, Attention):
            mixed = self._mixer(stream, self._local_index, attention, rows)
        else:
            assert recurrent is not None, "a recurrent layer needs states"
            state = recurrent.states[self._local_index]
            mixed = self._mixer(stream, state, recurrent.rows, rows)
        made = self._mlp(mixed)
        if self._token_input is not None and inputs is not None:
            own = inputs if rows is None else inputs.index_select(0, rows)
            made = self._token_input.add(made, own)
        # A norm that is begun was that of the stream without the factor.
        return made if self._factor is None else Stream(scale(made.hidden, self._factor), made.norm)


class DecoderForCausalLM:
    """One rank's part of the model."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, parallel: Parallel, stage: Stage | None = None
    ) -> None:
        """Build the layers. stage: the stage of a pipeline; None for all layers."""
        stage = stage or stage_of((spec.num_layers,), 0)

        def embedding() -> Tensor:
            name = "model.embed_tokens"
            return vocab_shard(weights, name, spec.vocab_size, spec.hidden_size, parallel)

        embedded = embedding() if stage.is_first else None
        self._embedding = (
            VocabParallelEmbedding(
                embedded,
                parallel,
                spec.embedding_scale,
                # Sums that are normed before they are added do not go that way.
                through_peers=not any(
                    layer.norms.after_mixer or layer.norms.after_mlp for layer in spec.layers
                ),
            )
            if embedded is not None
            else None
        )
        self._token_inputs = load_token_inputs(spec, weights, parallel)
        norms = [
            norm_before(spec, weights, f"model.layers.{i}", spec.layers[i].norms.before_mixer)
            for i in stage.layers
        ]
        self._first_norm = norms[0]
        # Not those of the norm's weights, which may be float32.
        self._stream_type = (spec.hidden_size, weights.dtype, weights.device)
        # A stage sends on the stream itself. The norm that its last product is given is never used,
        # so any norm will do: the right one belongs to another stage.
        following = [
            *norms[1:],
            hidden_norm(spec, weights, "model.norm") if stage.is_last else norms[0],
        ]
        own = layers_of(spec, stage)
        places = places_by_kind([type(layer.mixer) for layer in own])
        self._layers = [
            Layer(spec, weights, index, place, norm, parallel)
            for index, place, norm in zip(stage.layers, places, following, strict=True)
        ]
        for layer, behind in pairwise(self._layers):
            layer.precede(behind)
        self._num_layers = spec.num_layers
        self._kinds = kinds_of(own)
        products = [(type(layer.mixer), layer.mlp) for layer in own]
        self._distinct = [self._layers[i] for i in first_of_each(products)]
        """Layers whose products differ."""
        self._head: VocabParallelHead | None = None
        self._score: Tensor | None = None
        if stage.is_last and spec.pooling is not None:
            self._score = score_weight(spec, weights)
        elif stage.is_last:
            output: Matrix
            if spec.tie_word_embeddings:
                output = embedding() if embedded is None else embedded
            else:
                size = spec.vocab_size, spec.hidden_size
                output = head_shard(weights, "lm_head", *size, parallel)
            if spec.quantization is not None and spec.quantization.head is not None:
                output = rounded_head(output, spec.quantization.head)
            self._head = VocabParallelHead(
                output, spec.vocab_size, parallel, spec.logits_scale, spec.logits_softcap
            )

    @property
    def may_split(self) -> bool:
        """Whether a step may be computed in halves; see executor/attention/halves.py."""
        return all(layer.may_split for layer in self._layers)

    @contextmanager
    def kinds_of_layers(self) -> Iterator[None]:
        """Keep, within the context, only layers that differ in the kernels that they need.

        They are two layers for each kind of mixer, with each width of window, and kind of MLP (the
        first layer of all takes a stream whose norm has not begun), and the last layer, which goes
        on with fewer tokens.
        """
        layers, kinds = self._layers, self._kinds
        found = {
            i for kind in set(kinds) for i in [i for i, own in enumerate(kinds) if own == kind][:2]
        }
        self._layers = [layers[i] for i in sorted(found | {0, len(layers) - 1})]
        try:
            yield
        finally:
            self._layers = layers

    def warm_up(self, sizes: Iterable[int], *, with_head: bool = False) -> None:
        """Run the products of each kind of layer for each of these numbers of tokens.

        with_head: run the head's product too. The library chooses among many kernels by size, and
        loads a kernel when it is first used, for which it stops the device.
        """
        norm = self._first_norm
        for num_tokens in sizes:
            for layer in self._distinct:
                layer.warm_up(Stream(self._zeros(num_tokens), norm))
            if with_head and self._head is not None:
                self.logits(Stream(self._zeros(num_tokens), norm))

    def _zeros(self, num_tokens: int) -> Tensor:
        """Return memory like the residual stream's, [T, D]."""
        width, dtype, device = self._stream_type
        return torch.zeros(num_tokens, width, dtype=dtype, device=device)

    def new_logits(self, rows: int) -> Tensor:
        """Return memory for the logits of up to this many tokens."""
        assert self._head is not None
        return self._head.new_logits(rows, self._zeros(0))

    def __call__(
        self,
        token_ids: Tensor,
        attention: AttentionBackend | SplitStep,
        logits_rows: Tensor | None,
        out: Tensor | None = None,
        recurrent: RecurrentStep | None = None,
    ) -> Tensor:
        """Return logits [R, V] of some of the tokens token_ids int [T].

        logits_rows: indices of these tokens, int [R]; None for all. out: the first R rows of
        new_logits, which the logits are written to; on a GPU only. recurrent: see `states`.
        """
        return self.logits(self.states(token_ids, attention, logits_rows, recurrent), out)

    def states(
        self,
        inputs: Tensor,
        attention: AttentionBackend | SplitStep,
        rows: Tensor | None,
        recurrent: RecurrentStep | None = None,
    ) -> Stream:
        """Return the residual stream after this rank's last layer, of the tokens at `rows`.

        rows: int [R]; None for all. inputs: token ids int [T]; in a stage that is not the first,
        the stream [T, D] that the stage before has sent, which may be written over. recurrent: the
        states of this rank's recurrent layers, if there are any.
        """
        stream = self.entering(inputs)
        own = self.token_vectors(inputs, stream)
        return self.through_layers(stream, attention, rows, recurrent, own)

    def entering(self, inputs: Tensor) -> Stream:
        """Return the residual stream before this rank's first layer. inputs: see `states`."""
        norm = self._first_norm
        return Stream(inputs, norm) if self._embedding is None else self._embedding(inputs, norm)

    def token_vectors(self, inputs: Tensor, stream: Stream) -> Tensor | None:
        """Return the vectors [T, L * P] that layers take beside the stream that enters.

        None if they take none. inputs: see `states`.
        """
        return None if self._token_inputs is None else self._token_inputs(inputs, stream.hidden)

    def through_layers(
        self,
        stream: Stream,
        attention: AttentionBackend | SplitStep,
        rows: Tensor | None = None,
        recurrent: RecurrentStep | None = None,
        own: Tensor | None = None,
    ) -> Stream:
        """Return the residual stream after this rank's last layer, of the tokens at `rows`.

        own: see `token_vectors`. rows, recurrent: see `states`.
        """
        if isinstance(attention, SplitStep):
            assert rows is None and recurrent is None and own is None
            return attention.through(self._layers, stream)
        each: Sequence[Tensor | None] = [None] * len(self._layers)
        if own is not None:
            each = own.chunk(self._num_layers, 1)
        for layer, one in zip(self._layers[:-1], each, strict=False):
            stream = layer(stream, attention, None, recurrent, one)
        return self._layers[-1](stream, attention, rows, recurrent, each[-1])

    def logits(self, stream: Stream, out: Tensor | None = None) -> Tensor:
        """Return logits [R, V] of what `states` returned, or of some of its rows.

        Only the last stage may call this.
        """
        assert self._head is not None
        return self._head(stream, out)

    def scores(self, states: Tensor) -> Tensor:
        """Return the outputs of the head that classifies, float32 [R, W].

        states: float32 [R, D], pooled. Without such a head they are the result.
        """
        return states if self._score is None else states @ self._score.float().T
