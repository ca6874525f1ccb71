"""Attention by the kernel in C: the same bits for a token, whatever else a step computes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sidestep.executor.attention import native_backend
from sidestep.executor.attention.base import AttentionSetup, AttentionShape, StepBatch
from sidestep.executor.attention.native_backend import NativeAttention
from sidestep.executor.attention.rotary import RotaryTable
from sidestep.executor.attention.torch_backend import TorchAttention
from sidestep.executor.runner.host_tables import HostTables
from sidestep.executor.runner.input_batch import make_batch
from sidestep.ipc.model.layer_spec import RopeSpec
from sidestep.kernels.native import library
from sidestep.kernels.native.library import library_of
from tests.unit.executor.steps import Request, make_step

CPU = torch.device("cpu")
LENGTH = 150
"""Tokens of a row."""


@pytest.fixture(autouse=True, params=["as wide as they are", "of 256 bits"])
def vectors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if (reason := NativeAttention.missing(CPU)) is not None:
        pytest.skip(reason)
    if request.param == "of 256 bits":
        monkeypatch.setattr(
            native_backend, "library_of", lambda source, dtype: library_of(source, dtype, "NARROW")
        )


@dataclass(frozen=True)
class Case:
    """A model's attention."""

    heads: int
    kv_heads: int
    dim: int
    block_size: int = 16
    window: int = 0
    softcap: float | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float32

    def setup(self, rows: int) -> AttentionSetup:
        return AttentionSetup(
            shape=AttentionShape(
                num_layers=1,
                num_heads=self.heads,
                num_kv_heads=self.kv_heads,
                head_dim=self.dim,
                windows=(self.window,),
                softcaps=(self.softcap,),
                has_sinks=self.sinks,
            ),
            num_blocks=rows * -(-LENGTH // self.block_size),
            block_size=self.block_size,
            dtype=self.dtype,
            device=CPU,
            rotary=[RotaryTable(RopeSpec(theta=10000.0), self.dim, LENGTH, CPU)],
            norm_eps=1e-5,
            max_rows=rows,
        )


CASES = [
    Case(4, 4, 64),
    Case(8, 2, 128, window=37),
    Case(32, 1, 24, softcap=2.0),
    Case(6, 3, 80, block_size=3, window=9),
    Case(5, 5, 18, block_size=1, sinks=True),
    Case(40, 2, 64, block_size=256, dtype=torch.bfloat16),
    Case(4, 2, 512, dtype=torch.bfloat16, sinks=True),
]


def attended(
    case: Case,
    backend: type[NativeAttention | TorchAttention],
    inputs: list[Tensor],
    steps: Iterator[dict[int, int]],
) -> list[Tensor]:
    """Return the attention of each row's tokens, [LENGTH, H * D]. inputs: their projections.

    steps: how many more tokens of which rows each step computes.
    """
    rows = len(inputs)
    setup = case.setup(rows)
    made = backend(setup)
    made.cache.parts[0].fill_(255)  # NaN, unless the backend writes before it reads
    if backend is TorchAttention:
        made.cache.parts[0].zero_()
    torch.manual_seed(5)
    norms = torch.rand(case.dim).to(case.dtype) + 0.5, torch.rand(case.dim).to(case.dtype) + 0.5
    sinks = torch.randn(case.heads) if case.sinks else None
    state, free = HostTables(rows, LENGTH, case.block_size), list(range(setup.num_blocks))
    random.Random(1).shuffle(free)
    done, blocks = [0] * rows, [0] * rows
    out: list[list[Tensor]] = [[] for _ in range(rows)]
    for counts in steps:
        order = sorted(counts, key=lambda row: counts[row] > 1)
        entering = {row: Request([1] * counts[row], 1) for row in order if not done[row]}
        parts, planned = [], []
        for row in order:
            parts.append(inputs[row][done[row] : done[row] + counts[row]])
            done[row] += counts[row]
            needed = -(-done[row] // case.block_size) - blocks[row]
            blocks[row] += needed
            planned.append((row, counts[row], [free.pop() for _ in range(needed)]))
        step = make_step(planned, entering)
        state.apply(step)
        batch = make_batch(state, step, case.block_size)
        made.begin_step(
            StepBatch(
                positions=torch.from_numpy(batch.positions),
                slot_mapping=torch.from_numpy(batch.slot_mapping),
                host=batch,
                rows=None,
            )
        )
        got = made.attend(0, torch.cat(parts), norms, sinks)
        for row, part in zip(order, got.split([len(part) for part in parts]), strict=True):
            out[row].append(part)
    return [torch.cat(parts) for parts in out]


def projections(case: Case, rows: int) -> list[Tensor]:
    torch.manual_seed(rows)
    width = (case.heads + 2 * case.kv_heads) * case.dim
    return [torch.randn(LENGTH, width).to(case.dtype) for _ in range(rows)]


def at_random(rows: int, seed: int) -> Iterator[dict[int, int]]:
    """Yield steps in which some rows have one token, and others several."""
    rng, left = random.Random(seed), [LENGTH] * rows
    while any(left):
        ready = [row for row in range(rows) if left[row]]
        chosen = rng.sample(ready, rng.randint(1, len(ready)))
        counts = {row: min(left[row], rng.choice([1, 1, 2, 7, 40])) for row in chosen}
        for row, count in counts.items():
            left[row] -= count
        yield counts


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_the_bits_of_a_token_do_not_depend_on_chunks_other_rows_or_threads(case: Case) -> None:
    inputs, threads = projections(case, 3), torch.get_num_threads()
    alone = [attended(case, NativeAttention, [own], iter([{0: LENGTH}]))[0] for own in inputs]
    try:
        for seed in range(3):
            torch.set_num_threads(1 + seed)
            mixed = attended(case, NativeAttention, inputs, at_random(3, seed))
            for own, other in zip(alone, mixed, strict=True):
                assert torch.equal(own, other)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_it_gives_what_the_torch_backend_gives(case: Case) -> None:
    inputs = projections(case, 2)
    native, plain = (
        attended(case, backend, inputs, at_random(2, 7))
        for backend in (NativeAttention, TorchAttention)
    )
    tolerance = 2e-5 if case.dtype == torch.float32 else 3e-2
    for own, other in zip(native, plain, strict=True):
        torch.testing.assert_close(own, other, rtol=tolerance, atol=tolerance)


# Machines without a kernel.


def test_without_a_compiler_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    library.load.cache_clear()
    try:
        assert NativeAttention.missing(CPU) == "there is no C compiler (gcc)"
    finally:
        library.load.cache_clear()


def test_a_compiler_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "gcc"
    compiler.write_text("#!/bin/sh\necho 'gcc: broken' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(library, "_folder", tmp_path / "native")
    library.load.cache_clear()
    try:
        reason = NativeAttention.missing(CPU)
        assert reason == f"{compiler} cannot build attention.c: gcc: broken"
        assert not list((tmp_path / "native").iterdir())
    finally:
        library.load.cache_clear()


def test_sizes_that_it_does_not_take_are_named() -> None:
    def reason(dtype: torch.dtype, dim: int, block_size: int) -> str | None:
        return NativeAttention.refuses(dtype, [dim], block_size)

    assert reason(torch.float32, 512, 256) is None
    assert reason(torch.float16, 64, 16) == "it computes in float32 or bfloat16, not in float16"
    assert reason(torch.float32, 64, 257) == "it takes blocks of up to 256 tokens, not of 257"
    assert reason(torch.float32, 516, 16) == "it takes heads of up to 512 numbers, not of 516"
    assert reason(torch.float32, 16, 1) is None
    assert reason(torch.float32, 7, 2) == "it takes blocks of 16 numbers a head, not of 14"


def test_a_library_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_folder", tmp_path)
    library.load.cache_clear()
    try:
        library.load("attention.c")
        library.load.cache_clear()
        built = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.so")}
        assert len(built) == 1
        library.load("attention.c")
        assert {path: path.stat().st_mtime_ns for path in built} == built
        library.load("attention.c", "BFLOAT16")
        assert len(list(tmp_path.glob("*.so"))) == 2
    finally:
        library.load.cache_clear()


def test_numbers_that_are_not_finite_stay_so() -> None:
    case = Case(2, 2, 64)
    inputs = projections(case, 1)
    inputs[0][70, :64] = torch.nan  # a query: its own result alone
    inputs[0][100, 5 * 64 : 6 * 64] = torch.inf  # a value: all results from there on
    (got,) = attended(case, NativeAttention, inputs, iter([{0: LENGTH}]))
    finite = torch.isfinite(got)
    assert finite[:70].all() and not finite[70, :64].any() and finite[70, 64:].all()
    assert finite[71:100].all() and not finite[100:, 64:].any() and finite[100:, :64].all()
    assert np.isinf(got[100:, 64:].numpy()).all()
