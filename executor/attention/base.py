"""The interface between a model and its attention backend.

A new backend is a file here and a line in ipc.common.registry.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from sidestep.executor.attention.kv_memory import KvMemory
from sidestep.executor.attention.rotary import RotaryTable
from sidestep.executor.runner.input_batch import HostBatch
from sidestep.ipc.model.cache_groups import LayerPlace
from sidestep.ipc.model.kv.kv_layout import KvLayout
from sidestep.ipc.model.layer_size import LayerKv
from sidestep.ipc.transport.step import Int32
from sidestep.kernels.ops.rms_norm import Stream
from sidestep.kernels.unfinished_product import Product

Norms = tuple[Tensor, Tensor]
"""Weights [D] of the norms of each head's queries and keys."""


class Heads(NamedTuple):
    """The heads of a layer on one rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Sizes of one rank's attention."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int, ...]
    """Sliding window of each layer in tokens, 0 for none."""
    scales: tuple[float, ...] = ()
    """Factor on the products of queries and keys of each layer; none for 1 / sqrt(D) in all."""
    softcaps: tuple[float | None, ...] = ()
    """Bound of each layer's scores, if it has one; none if no layer has one."""
    has_sinks: bool = False
    """Whether any layer has sinks."""
    tables: tuple[int, ...] = ()
    """Index of each layer's rotary table; none if all layers have the first."""
    places: tuple[LayerPlace, ...] = ()
    """Where each layer's keys and values are; none if all layers are in the first cache group."""
    kept: tuple[LayerKv, ...] = ()
    """Keys and values that each layer keeps of a token; none if all keep the model's type."""
    heads: tuple[Heads, ...] = ()
    """Heads of each layer; none if all layers have those above."""
    sources: tuple[int, ...] = ()
    """Index of the layer whose keys and values each layer reads; none if all read their own."""

    @property
    def distinct_heads(self) -> tuple[Heads, ...]:
        """The heads that layers have, each once, in the order of the layers."""
        own = Heads(self.num_heads, self.num_kv_heads, self.head_dim)
        return tuple(dict.fromkeys(self.heads)) or (own,)

    def scale(self, layer: int) -> float:
        """Return a layer's factor on the products of queries and keys."""
        return self.scales[layer] if self.scales else float(self.head_dim**-0.5)

    def softcap(self, layer: int) -> float | None:
        """Return the bound of a layer's scores."""
        return self.softcaps[layer] if self.softcaps else None

    def table(self, layer: int) -> int:
        """Return the index of a layer's rotary table."""
        return self.tables[layer] if self.tables else 0

    def source(self, layer: int) -> int:
        """Return the index of the layer whose keys and values a layer reads."""
        return self.sources[layer] if self.sources else layer

    def place(self, layer: int) -> LayerPlace:
        """Return where a layer's keys and values are."""
        return self.places[layer] if self.places else LayerPlace(0, layer)

    @property
    def num_groups(self) -> int:
        """The number of cache groups up to the last one with a layer here."""
        return 1 + max((place.group for place in self.places), default=0)

    def kv_layout(self, dtype: torch.dtype, block_size: int) -> KvLayout:
        """Return the KV blocks. dtype: the model's type."""
        plain = LayerKv(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        return KvLayout(
            layers=self.kept or (plain,) * self.num_layers,
            places=tuple(self.place(layer) for layer in range(self.num_layers)),
            itemsize=dtype.itemsize,
            block_size=block_size,
        )


@dataclass(frozen=True, kw_only=True)
class AttentionSetup:
    """Arguments of an attention backend."""

    shape: AttentionShape
    num_blocks: int
    block_size: int
    dtype: torch.dtype
    device: torch.device
    rotary: Sequence[RotaryTable]
    """The different tables; `AttentionShape.tables` says which layer has which."""
    norm_eps: float
    max_rows: int
    """Most rows of a step."""
    queries: tuple[int, ...] = (1,)
    """Numbers of query tokens that decode rows may have; see `DeviceRows.queries`."""
    coded_products: bool = False
    """Whether the weights of the products before and behind attention are in codes."""
    experts: bool = False
    """Whether layers have experts, which stream by."""
    split_weights: int | None = None
    """Weights of a layer's products, if these may run for one half of a step's rows while the other
    half attends; else None."""
    memory: KvMemory | None = None
    """The blocks of these layers, where other backends share them; None to allocate them."""

    @property
    def kv_layout(self) -> KvLayout:
        """The KV blocks."""
        return self.shape.kv_layout(self.dtype, self.block_size)

    def open_memory(self, *, cleared: bool) -> KvMemory:
        """Return the blocks: the given ones, or new ones. cleared: see KvMemory."""
        if self.memory is not None:
            return self.memory
        return KvMemory(self.kv_layout, self.num_blocks, self.device, cleared=cleared)


@dataclass(frozen=True, kw_only=True)
class DeviceRows:
    """A step's rows on the device, R of them with padding.

    The bounds are fixed in a captured graph.
    """

    header: Tensor
    """int32: the number of rows, and how many of them decode. Decode rows come first."""
    slots: Tensor
    """int32 [R]"""
    seq_lens: Tensor
    """int32 [R] Tokens in the cache after this step."""
    query_starts: Tensor
    """int32 [R + 1] Index in T of each row's first token."""
    block_tables: Tensor
    """int32 [groups, slots, blocks of the longest request], by cache group and slot."""
    max_decode_rows: int
    """Most decode rows in a step of this kind; 0 if there are none."""
    max_prompt_rows: int
    """Most other rows in a step of this kind; 0 if there are none."""
    queries: int = 1
    """Query tokens of each decode row in a step of this kind: its last token and the drafts behind
    it. Decode row r has the tokens from r * queries on, and `seq_lens` counts them all."""
    valid_lens: Tensor | None = None
    """int32 [R] Tokens up to each decode row's last valid query, if fewer than `queries` may be
    valid; at least one is. The slot mapping of the others is -1, and nothing follows from what is
    computed for them. Ready as early as `seq_lens`."""


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """A step's T tokens, with padding, as a backend gets them."""

    positions: Tensor
    """int [T]"""
    slot_mapping: Tensor
    """int [groups, T] Block id * block size + offset of each token in the cache, by cache group; -1
    for padding."""
    host: HostBatch | None
    """The host's view of the step; None in a captured graph."""
    rows: DeviceRows | None
    """The device's view of the step; None where the host computes."""

    def of_rows(self, own: range) -> StepBatch:
        """Return some consecutive rows of a step of decodes on the device."""
        assert self.rows is not None and self.rows.max_prompt_rows == 0
        part = slice(own.start, own.stop)
        return replace(
            self,
            positions=self.positions[part],
            slot_mapping=self.slot_mapping[:, part],
            rows=replace(
                self.rows,
                slots=self.rows.slots[part],
                seq_lens=self.rows.seq_lens[part],
                query_starts=self.rows.query_starts[own.start : own.stop + 1],
                max_decode_rows=len(own),
            ),
        )


class Attends(abc.ABC):
    """The attention of a step's rows."""

    @abc.abstractmethod
    def attend(
        self,
        layer: int,
        qkv: Product,
        norms: Norms | None,
        sinks: Tensor | None = None,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        """Turn the projections into the attended heads: qkv [T, (H + 2 KVH) * D] to [T, H * D].

        A layer that reads the keys and values of another one has queries alone, qkv [T, H * D]; the
        other one has attended before, in this step. Queries and keys are normed where the model
        does so, and the rotary embedding is applied to them; keys and values are written to the
        cache; each token attends to the tokens before it and to itself. sinks float32 [H]: a score
        of each query head that the softmax's denominator has beside those of the keys. kv_scales
        float16 [2 KVH]: scales of the codes of keys, and behind them of values; one that is 0
        stands for a scale of each token, and so does None. May write over qkv, and scales
        it first where that is still to be done.
        """


class SplitLayer(Protocol):
    """A layer whose attention and products may run apart."""

    def attend(self, stream: Stream, attention: Attends) -> Tensor:
        """Return the heads' results, [T, H * D]."""

    def finish(self, stream: Stream, attended: Tensor) -> Stream:
        """Return the stream, which is added to in place, behind the layer."""


class SplitStep(abc.ABC):
    """A step of parts that go through the layers beside one another."""

    @abc.abstractmethod
    def through(self, layers: Sequence[SplitLayer], stream: Stream) -> Stream:
        """Return the stream of all tokens behind all layers."""


class AttentionBackend(Attends):
    """The owner of the KV cache and of its layout.

    Call `begin_step`, then `attend` for each layer in order.
    """

    cache: KvMemory
    """All blocks. The backend alone knows the order of the bytes in a block of a layer."""

    graph_safe: ClassVar[bool] = False
    """Whether a step needs nothing but `StepBatch.rows`, so that it can be captured in a CUDA
    graph."""
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.float16)
    """Types that it computes in."""
    head_dims: ClassVar[tuple[int, ...]] = ()
    """Sizes of heads that it takes, the most usual first; if empty, all even sizes."""

    keeps_codes: ClassVar[bool] = True
    """Whether it takes other formats of keys and values than the model's type."""

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        """Return why this backend cannot run on a device, or None if it can."""
        return None

    @classmethod
    def refuses(cls, dtype: torch.dtype, head_dims: Iterable[int], block_size: int) -> str | None:
        """Return why this backend takes no model with these sizes, or None if it does."""
        return None

    @abc.abstractmethod
    def __init__(self, setup: AttentionSetup) -> None:
        """Allocate the cache.

        Raises torch.OutOfMemoryError or RuntimeError when there is no room.
        """

    def copy_blocks(self, sources: Int32, targets: Int32) -> None:
        """Copy blocks in all layers that they belong to.

        The copies come before a step, and after everything that is queued already.
        """
        self.cache.copy_blocks(sources, targets)

    def split_context(self, rows: int) -> range | None:
        """Return with how many tokens of context it pays to compute a step of decodes in parts.

        Count the tokens of all rows. None: it never pays with this number of rows.
        """
        return None

    def split(self, batch: StepBatch) -> SplitStep:
        """Begin a step of decodes that is computed in parts, in place of `begin_step`.

        Only with numbers of rows for which `split_context` says when that pays.
        """
        raise AssertionError(f"{type(self).__name__} computes no step in parts")

    @abc.abstractmethod
    def begin_step(self, batch: StepBatch) -> None:
        """Prepare what all layers share."""
