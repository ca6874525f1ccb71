"""Kernels that read a step's tables before their wait are launched late enough (kernels.launch).

A GPU's runner checks this itself while it warms up. Here it does so in Triton's interpreter, with
the kernels of a step as they are, and with some moved, inserted or left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from sidestep.executor.attention import triton_backend
from sidestep.executor.attention.base import StepBatch
from sidestep.executor.attention.triton_backend import TritonAttention
from sidestep.executor.gpu import cuda_graphs, step_kernels
from sidestep.executor.gpu.gpu_runner import GpuRunner
from sidestep.kernels import launch_order
from sidestep.kernels.attention.attention_plan_triton import plan_attention
from sidestep.kernels.attention.qkv_rope_triton import qkv_rope as rope
from sidestep.kernels.launch_order import (
    LaunchOrder,
    LaunchOrderError,
    check_early_reads,
    checked_order,
)
from sidestep.kernels.triton.prepare_step_triton import prepare_step as prepare
from tests.e2e.models import write_model
from tests.triton.gpu_stand_in import standing_in, worker_args
from tests.triton.support import INTERPRETED

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not INTERPRETED, reason="with a GPU, the runner checks the order itself"),
    # Padding is not a number here (see standing_in), and numpy speaks up.
    pytest.mark.filterwarnings(
        "ignore:(overflow|invalid value|divide by zero) encountered in:RuntimeWarning"
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write the smallest model with two kinds of layers."""
    return write_model("llama-gqa", tmp_path_factory.mktemp("model"), num_hidden_layers=1)


def load(model: str) -> list[LaunchOrder]:
    """Load a runner, and return the orders of launches that it has checked."""
    orders: list[LaunchOrder] = []

    @contextmanager
    def kept() -> Iterator[LaunchOrder]:
        with checked_order() as order:
            orders.append(order)
            yield order

    with standing_in(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graphs, "checked_order", kept)
        GpuRunner(worker_args(model))
    return orders


def test_a_runner_checks_every_kind_of_step(model: str) -> None:
    (order,) = load(model)
    # Decode attention reads three tables early, attention to prompts one, the kernel before two.
    assert order.num_early_reads >= 3 + 1 + 2
    assert order.num_launches > order.num_early_reads


def test_a_plan_right_before_attention_is_refused(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moved: the plan is made in each layer, where it would be when it is needed."""
    plans: list[Callable[[], None]] = []

    def begin_step(self: TritonAttention, batch: StepBatch) -> None:
        plans.clear()
        begin(self, batch)

    def attend(self: TritonAttention, *args: Any) -> Any:
        for plan in plans:
            plan()
        return go_on(self, *args)

    begin: Any = TritonAttention.begin_step
    go_on: Any = TritonAttention._attend_decodes
    monkeypatch.setattr(TritonAttention, "begin_step", begin_step)
    monkeypatch.setattr(TritonAttention, "_attend_decodes", attend)
    monkeypatch.setattr(
        triton_backend,
        "plan_attention",
        lambda *args, **kwargs: plans.append(lambda: plan_attention(*args, **kwargs)),
    )
    with pytest.raises(LaunchOrderError, match=r"_decode reads tile_ends .* between it and _plan"):
        load(model)


def test_a_step_prepared_once_more_right_before_attention_is_refused(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inserted: a second kernel that writes the tables."""
    prepared: list[Callable[[], None]] = []

    def prepare_step(*args: Any) -> None:
        prepared[:] = [lambda: prepare(*args)]
        prepare(*args)

    def qkv_rope(*args: Any) -> None:
        prepared[0]()
        rope(*args)

    monkeypatch.setattr(step_kernels, "prepare_step", prepare_step)
    monkeypatch.setattr(triton_backend, "qkv_rope", qkv_rope)
    with pytest.raises(LaunchOrderError, match=r"_qkv_rope reads positions .* it and _prepare"):
        load(model)


@pytest.mark.parametrize("left_out", ["prepare_step", "plan_attention"])
def test_a_step_without_one_of_its_first_kernels_is_refused(
    left_out: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left out while steps are warmed up: an early reader finds no kernel that completes tables."""
    where = step_kernels if left_out == "prepare_step" else triton_backend
    whole, checking = getattr(where, left_out), list[LaunchOrder]()

    @contextmanager
    def kept() -> Iterator[LaunchOrder]:
        with checked_order() as order:
            checking.append(order)
            yield order

    def perhaps(*args: Any, **others: Any) -> None:
        if not checking:
            whole(*args, **others)
        elif left_out == "prepare_step":
            args[3].token_ids.zero_()  # they must be some

    monkeypatch.setattr(cuda_graphs, "checked_order", kept)
    monkeypatch.setattr(where, left_out, perhaps)
    with (
        standing_in(),
        pytest.raises(LaunchOrderError, match="no kernel launched before it completes that table"),
    ):
        GpuRunner(worker_args(model))


class Kernel:
    """Stands for a kernel with these parameters."""

    def __init__(self, name: str, **marks: tuple[str, ...]) -> None:
        self.arg_names = ["table"]

        def fn() -> None:
            pass

        fn.__name__ = name
        self.fn = fn
        for mark, tables in marks.items():
            getattr(launch_order, mark)(*tables)(self)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_another_launch_must_lie_between_the_writer_and_an_early_reader(device: str) -> None:
    table = torch.zeros(8, device=device)
    writer, reader, other = (
        Kernel("write", completes=("table",)),
        Kernel("read", reads_early=("table",)),
        Kernel("other"),
    )
    early = launch_order.opens_early(Kernel("early"))
    order = LaunchOrder()
    order.launch(writer, {"table": table})
    with pytest.raises(LaunchOrderError, match="read reads table .* between it and write"):
        order.launch(reader, {"table": table[2:]})
    order.launch(other, {"table": table})
    order.launch(reader, {"table": table[2:]})
    # A kernel that opens early may have started before the writer has ended.
    order.launch(writer, {"table": table})
    order.launch(early, {"table": table})
    with pytest.raises(LaunchOrderError, match="read reads table .* between it and write"):
        order.launch(reader, {"table": table})
    order.launch(other, {"table": table})
    order.launch(early, {"table": table})
    order.launch(reader, {"table": table})
    with pytest.raises(LaunchOrderError, match="no kernel launched before it"):
        order.launch(reader, {"table": torch.zeros(8, device=device)})
    assert (order.num_launches, order.num_early_reads) == (8, 2)
    # A product of torch's is a launch too; a view is none.
    order.launch(writer, {"table": table})
    with order:
        table.view(2, 4)
        torch.mm(table.view(2, 4), table.view(4, 2))
    order.launch(reader, {"table": table})


def test_a_mark_must_name_parameters() -> None:
    with pytest.raises(AssertionError, match="no parameter slots"):
        Kernel("read", reads_early=("slots",))


def test_early_reads_of_a_kernel_in_cuda_are_checked() -> None:
    table = torch.zeros(4)
    check_early_reads("own", table=table)  # nothing is checked outside
    with (
        checked_order(),
        pytest.raises(LaunchOrderError, match="own reads table before its gdc_wait"),
    ):
        check_early_reads("own", table=table)
    check_early_reads("own", table=table)
