"""Attention by FlashInfer (Ye et al. 2025), from the package `flashinfer-python`.

It is chosen by --attention-backend flashinfer, and takes half precision and the usual sizes of
heads.

FlashInfer plans each step on the host, so steps are launched kernel by kernel, never as CUDA
graphs. Norms, rotary embedding and the write to the cache are done by our own kernel.

Unless its package of compiled kernels (flashinfer-jit-cache) is installed, FlashInfer compiles a
model's kernels when they are first needed. This takes nvcc, ninja and some minutes; the kernels are
kept in ~/.cache/flashinfer. Here they are needed before the first step, while the engine starts.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sidestep.executor.attention.base import AttentionBackend, AttentionSetup, Norms, StepBatch
from sidestep.executor.runner.input_batch import HostBatch
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.transport.step import Int32
from sidestep.kernels.attention.common.rope import Rope
from sidestep.kernels.attention.qkv_rope_triton import qkv_rope
from sidestep.kernels.unfinished_product import Product, finished

_LAYOUT = "HND"
"""FlashInfer's name of the cache's layout."""
_LEAST_WORKSPACE = 128 << 20
"""Bytes, as FlashInfer advises."""
_GROUPED = 4
"""Query heads for each key head from which tensor cores are faster; FlashInfer's other kernel does
not know all numbers of heads."""


class FlashInferAttention(AttentionBackend):
    """Cache layout: for each layer [blocks, 2, KVH, block size, D], the keys' heads first."""

    dtypes = (torch.bfloat16, torch.float16)
    head_dims = (128, 64, 256)
    keeps_codes = False

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        """Return why FlashInfer cannot run on a device, or None if it can."""
        if device.type != "cuda":
            return "it needs a GPU"
        if importlib.util.find_spec("flashinfer") is None:
            return (
                "the package flashinfer-python is not installed "
                "(pip install 'sidestep[flashinfer]')"
            )
        if torch.cuda.get_device_capability(device) < (8, 0):
            return "it needs a GPU of compute capability 8.0 or newer"
        return None

    def __init__(self, setup: AttentionSetup) -> None:
        """Raise EngineStartError for a type or a head size that FlashInfer does not compute."""
        _check(setup)
        shape = setup.shape
        self._setup, self._shape = setup, shape
        # Cleared: the cache behind a row's last token may be read and masked, and 0 x NaN would
        # spread.
        self.cache = setup.open_memory(cleared=True)
        sizes = setup.num_blocks, 2, shape.num_kv_heads, setup.block_size, shape.head_dim
        self._layers = [
            self.cache.of_layer(layer).view(setup.dtype).view(sizes)
            for layer in range(shape.num_layers)
        ]
        self._wrappers: Wrappers | None = None
        self._batch: StepBatch | None = None
        self._num_decode = 0

    def begin_step(self, batch: StepBatch) -> None:
        """Plan the step."""
        host = batch.host
        assert host is not None, "this backend needs the host's view of a step"
        if self._wrappers is None:
            # Not when the cache is made: the engine gives the cache the memory that the first step
            # leaves free, and that step must have the workspace.
            self._wrappers = load_wrappers(self._setup)
        self._batch, self._num_decode = batch, host.num_decode_rows
        self._wrappers.plan(host)

    def attend(
        self,
        layer: int,
        qkv: Product,
        norms: Norms | None,
        sinks: Tensor | None = None,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        """Write keys and values to the cache, then attend: decode rows, then the others."""
        qkv = finished(qkv)
        assert sinks is None, "models with sinks are refused at the start"
        assert kv_scales is None, "codes are refused at the start"
        shape, setup, rows = self._shape, self._setup, self._num_decode
        batch, wrappers = self._batch, self._wrappers
        assert batch is not None and wrappers is not None, "begin_step comes first"
        group, window = shape.place(layer).group, shape.windows[layer]
        cache = self._layers[layer]
        table = setup.rotary[shape.table(layer)]
        qkv_rope(
            qkv,
            batch.positions,
            batch.slot_mapping[group],
            Rope(table.cos, table.sin, norms, setup.norm_eps),
            cache.flatten(1, 2),
            shape.num_heads,
        )
        q = qkv.view(len(qkv), -1, shape.head_dim)[:, : shape.num_heads]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if rows:
            wrappers.decode[window].run(q[:rows], cache, out=out[:rows])
        if rows < len(q):
            wrappers.prompts[window].run(q[rows:], cache, out=out[rows:])
        return out.flatten(1)


@dataclass(frozen=True, kw_only=True)
class Pages:
    """Where some rows' tokens are in the cache, as FlashInfer's plans take it. R rows."""

    query_starts: Int32
    """[R + 1] Index of each row's first token among these rows' tokens."""
    page_starts: Int32
    """[R + 1] Index of each row's first page in `pages`."""
    pages: Int32
    """Block ids of all tokens in the cache, row after row."""
    last_page_lens: Int32
    """[R] Tokens in each row's last page."""
    seq_lens: Int32
    """[R] Tokens in the cache after this step."""


def pages_of(host: HostBatch, first: int, stop: int, group: int = 0) -> Pages:
    """Return the pages of rows first..stop, of which there is at least one, in a cache group."""
    seq_lens = host.seq_lens[first:stop]
    counts = -(-seq_lens // host.block_size)
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    tables = host.block_tables[group, first:stop, : int(counts.max())]
    queries = host.query_starts[first : stop + 1]
    return Pages(
        query_starts=(queries - queries[0]).astype(np.int32),
        page_starts=starts,
        pages=tables[np.arange(tables.shape[1]) < counts[:, None]],
        last_page_lens=seq_lens - (counts - 1) * host.block_size,
        seq_lens=seq_lens,
    )


class Wrappers:
    """FlashInfer's state for each window, apart for decode rows and prompt rows.

    All share one workspace: kernels that use it run one after the other.

    A plan is written to pinned memory of the wrapper's own, and copied from there behind the
    kernels of the step before. The next plan must not overwrite it until it is copied; the event
    `_copied` says when. With two steps in flight there is no wait: when a step comes, the step
    before the last is over, and the last step's copies were queued only behind that one.
    """

    def __init__(self, setup: AttentionSetup, flashinfer: Any) -> None:
        self._setup = setup
        shape, windows = setup.shape, set(setup.shape.windows)
        workspace = torch.zeros(workspace_size(setup), dtype=torch.uint8, device=setup.device)
        grouped = shape.num_heads // shape.num_kv_heads >= _GROUPED
        self.decode = {
            window: flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace, _LAYOUT, use_tensor_cores=grouped
            )
            for window in windows
        }
        self.prompts = {
            window: flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, _LAYOUT)
            for window in windows
        }
        self._copied = torch.cuda.Event()

    def plan(self, host: HostBatch) -> None:
        """Prepare every wrapper that the step needs."""
        rows, decodes = len(host.seq_lens), host.num_decode_rows
        group = self._setup.shape.place(0).group  # that of all layers
        self._copied.synchronize()
        if decodes:
            self._plan_decode(pages_of(host, 0, decodes, group))
        if decodes < rows:
            self._plan_prompts(pages_of(host, decodes, rows, group))
        self._copied.record()

    def compile(self) -> None:
        """Plan a row of one token, which loads the kernels or compiles them."""
        zero, one, ends = np.zeros(1, np.int32), np.ones(1, np.int32), np.arange(2, dtype=np.int32)
        row = Pages(
            query_starts=ends, page_starts=ends, pages=zero, last_page_lens=one, seq_lens=one
        )
        self._plan_decode(row)
        self._plan_prompts(row)
        self._copied.record()

    def _plan_decode(self, rows: Pages) -> None:
        columns = [pinned(column) for column in (rows.page_starts, rows.pages, rows.last_page_lens)]
        seq_lens = pinned(rows.seq_lens)
        for window, wrapper in self.decode.items():
            wrapper.plan(*columns, *self._sizes(), seq_lens=seq_lens, **self._options(window))

    def _plan_prompts(self, rows: Pages) -> None:
        columns = [
            pinned(column)
            for column in (rows.query_starts, rows.page_starts, rows.pages, rows.last_page_lens)
        ]
        seq_lens = pinned(rows.seq_lens)
        for window, wrapper in self.prompts.items():
            wrapper.plan(
                *columns, *self._sizes(), causal=True, seq_lens=seq_lens, **self._options(window)
            )

    def _sizes(self) -> tuple[int, int, int, int]:
        shape = self._setup.shape
        return shape.num_heads, shape.num_kv_heads, shape.head_dim, self._setup.block_size

    def _options(self, window: int) -> dict[str, Any]:
        # FlashInfer does not count the token itself as part of the window, and -1 is none.
        return {
            "window_left": window - 1,
            "q_data_type": self._setup.dtype,
            "kv_data_type": self._setup.dtype,
            "sm_scale": self._setup.shape.scale(0),
        }


def load_wrappers(setup: AttentionSetup) -> Wrappers:
    """Return wrappers whose kernels are loaded.

    Raises EngineStartError if FlashInfer cannot be imported or cannot compile.
    """
    try:
        import flashinfer

        wrappers = Wrappers(setup, flashinfer)
        wrappers.compile()
    except torch.OutOfMemoryError:
        raise  # the caller, which made room for the cache, knows what to change
    except Exception as error:
        cause = (str(error).strip().splitlines() or [""])[0]
        raise EngineStartError(
            "attention_backend: flashinfer did not start "
            f"({type(error).__name__}: {cause}). It compiles its kernels "
            "when they are first used, which needs nvcc and ninja on the path; install those, or "
            "the package flashinfer-jit-cache of the same version, or choose another backend"
        ) from error
    return wrappers


def workspace_size(setup: AttentionSetup) -> int:
    """Return the bytes for partial results where a row's keys are split.

    FlashInfer splits until two programs run on each multiprocessor. Each program has a tile of
    queries of one key head, and keeps a float32 [D] and a sum for each query.
    """
    shape = setup.shape
    programs = 2 * torch.cuda.get_device_properties(setup.device).multi_processor_count
    tile = min(128, 16384 // shape.head_dim)
    group = shape.num_heads // shape.num_kv_heads
    return max(_LEAST_WORKSPACE, 4 * programs * group * tile * (shape.head_dim + 1))


def pinned(column: Int32) -> Tensor:
    """Return a copy of the column in pinned memory."""
    return torch.from_numpy(np.ascontiguousarray(column)).pin_memory()


def _check(setup: AttentionSetup) -> None:
    if setup.dtype not in FlashInferAttention.dtypes:
        raise EngineStartError(
            f"dtype: attention_backend 'flashinfer' computes in bfloat16 or float16, not "
            f"{str(setup.dtype).removeprefix('torch.')}; change one of the two"
        )
    if len(set(setup.shape.scales)) > 1:
        raise EngineStartError(
            "attention_backend: 'flashinfer' takes one scale for all layers, this model's layers "
            "have several; choose another backend"
        )
    if len({place.group for place in setup.shape.places}) > 1:
        raise EngineStartError(
            "attention_backend: 'flashinfer' takes one window for all layers, this model's layers "
            "have several; choose another backend"
        )
    if setup.memory is not None or setup.shape.sources:
        raise EngineStartError(
            "attention_backend: 'flashinfer' takes layers with heads of one shape and with keys of "
            "their own, this model has others; choose another backend"
        )
    if setup.shape.has_sinks or any(setup.shape.softcaps):
        raise EngineStartError(
            "attention_backend: 'flashinfer' takes models without sinks and without a softcap of "
            "scores; choose another backend"
        )
    if setup.shape.head_dim not in FlashInferAttention.head_dims:
        sizes = ", ".join(map(str, sorted(FlashInferAttention.head_dims)))
        raise EngineStartError(
            f"attention_backend: 'flashinfer' takes heads of size {sizes}, this model's have "
            f"{setup.shape.head_dim}; choose another backend"
        )
