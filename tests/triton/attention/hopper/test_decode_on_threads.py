"""Decode attention of many rows computes the same in any order of threads and copies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from sidestep.kernels.attention.decode_config import DecodeConfig
from sidestep.kernels.attention.decode_scratch import DecodeScratch
from sidestep.kernels.attention.hopper import decode_hopper
from sidestep.kernels.attention.hopper.decode_hopper import Form, HopperScratch
from tests.triton.attention.projections import check_projections
from tests.triton.attention.test_decode_attention import check, launch
from tests.triton.batches import Batch, Shape, make_batch, with_scores
from tests.triton.cuda_on_threads.attention_on_threads import Emulated
from tests.triton.cuda_on_threads.building import runs_here
from tests.triton.support import INTERPRETED, PoisonedAllocations, same

pytestmark = pytest.mark.skipif(
    not (INTERPRETED and runs_here()), reason="needs g++ and an x86-64 processor, and no GPU"
)
ORDERS = [(1, 2000), (2, 50000)]
"""Seeds, and how hasty copies are."""


class OnThreads:
    """Forms of the kernel on the CPU, and the order of the next launch."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        """Take where folders are made."""
        self.order = ORDERS[0]
        self._folders = folders
        self._made: dict[Form, Emulated] = {}

    def to_launch(self, form: Form, _: Tensor) -> Emulated:
        """Return a kernel, as Kernels.to_launch does."""
        if form not in self._made:
            self._made[form] = Emulated(form, self._folders.mktemp("attention"))
        self._made[form].seed, self._made[form].haste = self.order
        return self._made[form]


@pytest.fixture(scope="module")
def on_threads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnThreads]:
    """Let the kernel run on the CPU."""
    made = OnThreads(tmp_path_factory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_hopper._KERNELS, "to_launch", made.to_launch)
        patch.setattr(decode_hopper, "takes", lambda *_: True)
        yield made


def scratch_of(batch: Batch, parts: int) -> DecodeScratch:
    """Return poisoned scratch memory for shares of as many blocks a head."""
    shape = batch.shape
    config = DecodeConfig(tile=decode_hopper.TILE, min_tiles=1)
    with PoisonedAllocations():
        scratch = batch.scratch(config)
        scratch.hopper = HopperScratch(shape.heads, shape.kv_heads, shape.dim, batch.q.device)
    kept = scratch.hopper.parts
    scratch.hopper.blocks = parts * shape.kv_heads
    scratch.hopper.parts = kept.new_full((2 * scratch.hopper.blocks, kept.shape[1]), -1)
    return scratch


def check_orders(on_threads: OnThreads, batch: Batch, parts: int, window: int = 0) -> None:
    scratch, found = scratch_of(batch, parts), []
    for on_threads.order in ORDERS:
        check(batch, scratch, window)
        found.append(launch(batch, scratch, window))
        assert scratch.hopper is not None
        assert (scratch.hopper.parts == -1).all(), "the next launch would find a part"
    assert same(*found)


@pytest.mark.parametrize("parts", [1, 3, 7])
@pytest.mark.parametrize(
    ("shape", "window"),
    [(Shape(8, 2, 128, 64), 0), (Shape(9, 1, 64, 16), 100), (Shape(2, 1, 256, 48), 0)],
    ids=str,
)
def test_any_order(shape: Shape, window: int, parts: int, on_threads: OnThreads) -> None:
    lengths = [300, 1, 77, 32, 33, 140]
    check_orders(on_threads, make_batch(shape, lengths, torch.bfloat16), parts, window)


@pytest.mark.parametrize("parts", [1, 3, 7])
@pytest.mark.parametrize(
    ("shape", "window", "norms"),
    [
        (Shape(8, 2, 128, 64), 0, True),
        (Shape(7, 1, 64, 16), 100, False),
        (Shape(2, 1, 256, 48), 0, True),
    ],
    ids=str,
)
def test_projections(
    shape: Shape, window: int, norms: bool, parts: int, on_threads: OnThreads
) -> None:
    for on_threads.order in ORDERS:
        batch = make_batch(shape, [300, 1, 77, 32, 33, 140], torch.bfloat16)
        check_projections(batch, scratch_of(batch, parts), window, with_norms=norms)


def test_sinks_and_rows_that_many_blocks_share(on_threads: OnThreads) -> None:
    batch = make_batch(Shape(4, 1, 64, 64), [5, 900, 40], torch.bfloat16)
    check_orders(on_threads, with_scores(batch, None, 2.0), 12)


@pytest.mark.usefixtures("on_threads")
def test_parts_that_are_not_numbers() -> None:
    """A block that waited for a number would wait for ever."""
    batch = make_batch(Shape(4, 1, 64, 64), [200, 90, 20, 300], torch.bfloat16)
    # NaN of values reach the sums. All bits are set, as in a part that is not there.
    batch.cache[:, 1:].view(torch.int16)[:] = -1
    scratch = scratch_of(batch, 5)
    assert launch(batch, scratch, 0).isnan().all()
    assert scratch.hopper is not None
    assert (scratch.hopper.parts == -1).all()
