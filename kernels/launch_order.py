"""A check of the order of launches that kernels.launch asks for.

A kernel that reads a step's tables before its `gdc_wait` names them with `reads_early`. A kernel
after whose end such tables are complete names them with `completes`. Within `checked_order` each
launch of such a kernel is compared with the launches before it. Outside of it a launch costs
nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

_TORCH_KERNELS = frozenset(
    ("linear", "mm", "addmm", "addmm_", "embedding", "index_select", "copy_")
)
"""Functions of torch that launch at least one kernel, as far as a step's layers use them. A missing
function makes the check stricter, never looser."""

Kernel = TypeVar("Kernel")


class LaunchOrderError(RuntimeError):
    """A kernel may read tables that are not complete yet."""


def completes(*tables: str) -> Callable[[Kernel], Kernel]:
    """Return a decorator of a kernel after whose end these tables are complete.

    tables: names of parameters. They may also be written before the kernel, as the message of a
    step is, by the copy before its first kernel.
    """
    return _marker("completed_tables", tables)


def reads_early(*tables: str) -> Callable[[Kernel], Kernel]:
    """Return a decorator of a kernel that reads these tables before its `gdc_wait`.

    tables: names of parameters. A launch may have None for one.
    """
    return _marker("early_tables", tables)


def opens_early(kernel: Kernel) -> Kernel:
    """Mark a kernel that lets the next one start before its own `gdc_wait`."""
    kernel.opens_early = True  # type: ignore[attr-defined]
    return kernel


def _marker(attribute: str, tables: Sequence[str]) -> Callable[[Kernel], Kernel]:
    def mark(kernel: Kernel) -> Kernel:
        names: Sequence[str] = kernel.arg_names  # type: ignore[attr-defined]
        missing = [table for table in tables if table not in names]
        assert not missing, f"the kernel has no parameter {missing[0]}"
        setattr(kernel, attribute, tables)
        return kernel

    return mark


class _Completed(NamedTuple):
    """A launch after whose end a table is complete."""

    launch: int
    kernel: str
    table: Tensor
    """Kept, so that no other tensor gets its memory."""


class LaunchOrder(TorchFunctionMode):
    """Counts the launches of Triton's kernels and torch's, in the order in which they are made."""

    def __init__(self) -> None:
        super().__init__()
        self.num_launches = 0
        self.last_waiting = -1
        """The last launch of a kernel that opens after its wait. Torch's open by ending."""
        self.num_early_reads = 0
        """Tables that were found to be complete."""
        self._completed: dict[int, _Completed] = {}
        """By a tensor's storage."""

    def __repr__(self) -> str:
        return f"LaunchOrder({self.num_launches} launches, {self.num_early_reads} early reads)"

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count the kernel that a function of torch launches."""
        if getattr(func, "__name__", "") in _TORCH_KERNELS:
            self._count(opens_early=False)
        return func(*args, **(kwargs or {}))

    def launch(self, kernel: Any, arguments: dict[str, Any]) -> None:
        """Note a launch of a Triton kernel.

        Raises LaunchOrderError if the kernel reads a table early that may not be complete.
        """
        name = kernel.fn.__name__
        for table in getattr(kernel, "early_tables", ()):
            if arguments[table] is not None:
                self._check(name, table, self._completed.get(_storage(arguments[table])))
        for table in getattr(kernel, "completed_tables", ()):
            tensor = arguments[table]
            self._completed[_storage(tensor)] = _Completed(self.num_launches, name, tensor)
        self._count(opens_early=getattr(kernel, "opens_early", False))

    def check(self, kernel: str, tables: Mapping[str, Tensor]) -> None:
        """Check tables that a kernel reads early. Raises LaunchOrderError."""
        for name, table in tables.items():
            self._check(kernel, name, self._completed.get(_storage(table)))

    def _count(self, *, opens_early: bool) -> None:
        if not opens_early:
            self.last_waiting = self.num_launches
        self.num_launches += 1

    def _check(self, kernel: str, table: str, completed: _Completed | None) -> None:
        if completed is None:
            raise LaunchOrderError(
                f"the kernel {kernel} reads {table} before its gdc_wait, but no kernel launched "
                "before it completes that table (see kernels/launch.py)"
            )
        if completed.launch >= self.last_waiting:
            raise LaunchOrderError(
                f"the kernel {kernel} reads {table} before its gdc_wait, but no kernel that opens "
                f"after its own wait lies between it and {completed.kernel}, which completes that "
                "table (see kernels/launch.py)"
            )
        self.num_early_reads += 1


def _storage(tensor: Tensor) -> int:
    """Return what tells the memory of a tensor from that of others, on torch's meta device too."""
    return int(tensor.untyped_storage()._cdata)


_orders: list[LaunchOrder] = []
"""The ones that `checked_order` has begun."""


def check_early_reads(kernel: str, **tables: Tensor) -> None:
    """Check the tables that a kernel in CUDA C++ reads before its wait, within `checked_order`.

    Raises LaunchOrderError if one may not be complete.
    """
    for order in _orders:
        order.check(kernel, tables)


@contextmanager
def checked_order() -> Iterator[LaunchOrder]:
    """Check, within the context, each launch of this process, while no other thread launches.

    A launch that breaks the rule raises LaunchOrderError.
    """
    order = LaunchOrder()
    kinds: tuple[Any, ...] = (JITFunction, InterpretedFunction)
    before = [kind.run for kind in kinds]

    def counted(run: Any) -> Any:
        def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
            order.launch(self, {**dict(zip(self.arg_names, args, strict=False)), **kwargs})
            counts = order.num_launches, order.last_waiting
            try:
                return run(self, *args, **kwargs)
            finally:
                # The interpreter's own use of torch is no launch.
                order.num_launches, order.last_waiting = counts

        return launch

    for kind, run in zip(kinds, before, strict=True):
        kind.run = counted(run)
    _orders.append(order)
    try:
        with order:
            yield order
    finally:
        _orders.remove(order)
        for kind, run in zip(kinds, before, strict=True):
            kind.run = run
