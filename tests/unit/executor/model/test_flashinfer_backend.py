"""The FlashInfer backend where there is neither the package nor a GPU.

A stand-in that follows the package's documentation receives the calls of FlashInfer. The tests also
cover refusals. With both package and GPU, the test of all backends runs it too.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sidestep.executor.attention import flashinfer_backend
from sidestep.executor.attention.base import AttentionSetup, AttentionShape
from sidestep.executor.attention.flashinfer_backend import FlashInferAttention, pages_of
from sidestep.executor.attention.rotary import RotaryTable
from sidestep.executor.runner.host_tables import HostTables
from sidestep.executor.runner.input_batch import make_batch
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.model.layer_spec import RopeSpec
from tests.unit.executor.model.test_attention import Sequences, exact
from tests.unit.executor.steps import Request, make_step

CPU = torch.device("cpu")


class Wrapper:
    """Common part of both kinds of wrapper: `run` attends as the last `plan` said."""

    def __init__(
        self, workspace: Tensor, kv_layout: str, use_tensor_cores: bool | None = None
    ) -> None:
        assert workspace.dtype == torch.uint8 and kv_layout == "HND"
        self.use_tensor_cores = use_tensor_cores

    def _plan(
        self,
        query_starts: list[int],
        page_starts: Tensor,
        pages: Tensor,
        last_lens: Tensor,
        sizes: Any,
        seq_lens: Tensor,
        window_left: int,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        for column in (page_starts, pages, last_lens, seq_lens):
            assert column.dtype == torch.int32 and column.is_contiguous()
        heads, kv_heads, self.dim, self.page = sizes
        assert heads % kv_heads == 0 and q_data_type == kv_data_type and sm_scale == self.dim**-0.5
        assert (
            self.use_tensor_cores
            or self.use_tensor_cores is None
            or heads // kv_heads in (1, 2, 3, 4, 8)
        )
        self.query_starts, self.window, self.dtype = query_starts, window_left + 1, q_data_type
        ends = page_starts.tolist()
        self.pages = [pages[a:b] for a, b in zip(ends, ends[1:], strict=False)]
        self.lens = [
            (len(p) - 1) * self.page + n
            for p, n in zip(self.pages, last_lens.tolist(), strict=True)
        ]
        assert self.lens == seq_lens.tolist()
        assert all(1 <= n <= self.page for n in last_lens.tolist())

    def run(self, q: Tensor, cache: Tensor, *, out: Tensor) -> None:
        assert (
            q.dtype == cache.dtype == self.dtype
            and len(q) == self.query_starts[-1]
            and out.shape == q.shape
        )
        assert cache.shape[1] == 2 and cache.shape[3:] == (self.page, self.dim)
        starts = self.query_starts
        for start, stop, pages, length in zip(
            starts, starts[1:], self.pages, self.lens, strict=False
        ):
            k, v = (
                cache[pages.long(), i].transpose(0, 1).flatten(1, 2)[:, :length].transpose(0, 1)
                for i in (0, 1)
            )
            out[start:stop] = exact(q[start:stop].cpu(), k.cpu(), v.cpu(), self.window).to(out)


class Decode(Wrapper):
    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, *sizes: int, **options: Any
    ) -> None:
        self._plan(
            list(range(len(last_page_len) + 1)), indptr, indices, last_page_len, sizes, **options
        )


class Prefill(Wrapper):
    def plan(
        self,
        qo_indptr: Tensor,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        *sizes: int,
        causal: bool,
        **options: Any,
    ) -> None:
        assert causal and qo_indptr.dtype == torch.int32
        self._plan(qo_indptr.tolist(), indptr, indices, last_page_len, sizes, **options)


class Event:
    def synchronize(self) -> None:
        pass

    def record(self) -> None:
        pass


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install FlashInfer's stand-in, which needs no GPU."""
    stand_in: Any = types.ModuleType("flashinfer")
    stand_in.BatchDecodeWithPagedKVCacheWrapper = Decode
    stand_in.BatchPrefillWithPagedKVCacheWrapper = Prefill
    monkeypatch.setitem(sys.modules, "flashinfer", stand_in)
    monkeypatch.setattr(
        flashinfer_backend, "pinned", lambda column: torch.from_numpy(np.ascontiguousarray(column))
    )
    monkeypatch.setattr(flashinfer_backend, "workspace_size", lambda setup: 16)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return stand_in


def make_setup(*, head_dim: int = 64, **changes: Any) -> AttentionSetup:
    shape = AttentionShape(
        num_layers=1, num_heads=4, num_kv_heads=2, head_dim=head_dim, windows=(0,)
    )
    rotary = RotaryTable(RopeSpec(theta=10000.0), head_dim, 32, CPU)
    return replace(
        AttentionSetup(
            shape=shape,
            num_blocks=2,
            block_size=16,
            dtype=torch.bfloat16,
            device=CPU,
            rotary=[rotary],
            norm_eps=1e-5,
            max_rows=2,
        ),
        **changes,
    )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "block_size", "windows"), [(4, 2, 16, (0, 9)), (10, 2, 48, (9, 0))]
)
def test_mixed_steps_ask_flashinfer_for_the_right_thing(
    package: Any, heads: int, kv_heads: int, block_size: int, windows: tuple[int, ...]
) -> None:
    sequences = Sequences(
        FlashInferAttention, 4, heads, kv_heads, 64, block_size, windows, longest=70
    )
    sequences.step({0: 1, 1: 1, 2: 13})
    sequences.step({0: 1, 1: 9, 2: 1})
    sequences.step({0: 1, 1: 1, 2: 1})
    sequences.step({2: 2, 3: 20})


def test_pages_of_rows() -> None:
    state = HostTables(3, 64, 16)
    step = make_step(
        [(2, 1, [7]), (0, 16, [5]), (1, 33, [4, 1, 6])],
        {0: Request([1] * 16, 1), 1: Request([1] * 33, 1), 2: Request([1], 1)},
    )
    state.apply(step)
    batch = make_batch(state, step, 16)
    prompts, decode = pages_of(batch, 1, 3), pages_of(batch, 0, 1)
    assert prompts.query_starts.tolist() == [0, 16, 49]
    assert prompts.page_starts.tolist() == [0, 1, 4]
    assert prompts.pages.tolist() == [5, 4, 1, 6]
    assert prompts.last_page_lens.tolist() == [16, 1]
    assert prompts.seq_lens.tolist() == [16, 33]
    assert (decode.page_starts.tolist(), decode.pages.tolist(), decode.last_page_lens.tolist()) == (
        [0, 1],
        [7],
        [1],
    )


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FlashInferAttention.missing(CPU) == "it needs a GPU"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "flashinfer-python is not installed" in str(
        FlashInferAttention.missing(torch.device("cuda"))
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "compute capability" in str(FlashInferAttention.missing(torch.device("cuda")))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert FlashInferAttention.missing(torch.device("cuda")) is None


def test_the_package_is_not_imported_before_a_step() -> None:
    before = "flashinfer" in sys.modules
    FlashInferAttention(make_setup())
    assert ("flashinfer" in sys.modules) == before


def test_a_type_that_flashinfer_lacks_is_refused_by_the_name_of_its_option() -> None:
    with pytest.raises(EngineStartError, match=r"^dtype: .*bfloat16 or float16, not float32"):
        FlashInferAttention(make_setup(dtype=torch.float32))


def test_a_head_size_that_flashinfer_lacks_is_refused() -> None:
    with pytest.raises(
        EngineStartError, match=r"^attention_backend: 'flashinfer' .* 64, 128, 256, .* 80; choose"
    ):
        FlashInferAttention(make_setup(head_dim=80))


@pytest.mark.parametrize("field", [{"softcaps": (None, 50.0)}, {"has_sinks": True}], ids=str)
def test_scores_that_flashinfer_is_not_asked_for_are_refused(field: dict[str, Any]) -> None:
    setup = make_setup()
    with pytest.raises(EngineStartError, match=r"^attention_backend: .* without sinks .*; choose"):
        FlashInferAttention(replace(setup, shape=replace(setup.shape, **field)))


def test_kernels_that_cannot_be_compiled_are_a_refusal_to_start(
    package: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_compiler(*args: Any, **options: Any) -> None:
        raise RuntimeError("Could not find nvcc\nand more lines")

    monkeypatch.setattr(Prefill, "plan", no_compiler)
    with pytest.raises(
        EngineStartError,
        match=r"^attention_backend: .*\(RuntimeError: Could not find nvcc\).* ninja",
    ):
        flashinfer_backend.load_wrappers(make_setup())


def test_too_little_memory_is_left_to_the_engine_to_explain(
    package: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_little(*args: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Decode, "plan", too_little)
    with pytest.raises(torch.OutOfMemoryError):
        flashinfer_backend.load_wrappers(make_setup())
