"""torch without its shapes of tensors without memory, in processes of their own."""

from __future__ import annotations

import pytest

from tests.processes import run_python

BEGIN = """
import sys
from sidestep.executor.processes.torch_import import import_torch
import_torch()
import torch
def imported():
    return "torch._decomp" in sys.modules and hasattr(torch._meta_registrations, "register_meta")
assert "torch._decomp" not in sys.modules
"""


def run(program: str) -> None:
    run_python(BEGIN + program)


def test_numbers_need_no_shapes() -> None:
    run(
        "g = torch.Generator().manual_seed(3)\n"
        "x = torch.rand(3, 4, generator=g)\n"
        "assert torch.allclose(torch.nn.functional.linear(x, x), x @ x.T)\n"
        "assert x.sort().values.cumsum(0).topk(2).indices.shape == (3, 2)\n"
        "assert 'torch._decomp' not in sys.modules\n"
    )


@pytest.mark.parametrize(
    "use",
    [
        "torch._meta_registrations.register_meta",
        "from torch._meta_registrations import register_meta",
        "torch.compile(lambda x: x.sin() + 1, backend='eager')(torch.zeros(3))",
        "from torch._subclasses.fake_tensor import FakeTensorMode\n"
        "with FakeTensorMode(): assert torch.linalg.lu_factor(torch.empty(3, 3)).LU.shape[0] == 3",
    ],
)
def test_whatever_needs_shapes_imports_them(use: str) -> None:
    run(f"{use}\nassert imported()\nimport torch._meta_registrations as again\nagain.register_meta")


def test_a_module_that_works_in_one_order_only_is_imported_in_it() -> None:
    run("from torch.utils._content_store import ContentStoreReader")


def test_threads_that_ask_at_once_get_the_same_module() -> None:
    run(
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from threading import Barrier\n"
        "start = Barrier(4)\n"
        "def ask(_):\n"
        "    start.wait()\n"
        "    return torch._meta_registrations.register_meta\n"
        "with ThreadPoolExecutor(4) as threads:\n"
        "    assert len(set(threads.map(ask, range(4)))) == 1\n"
    )


def test_a_name_that_is_not_there_is_an_error() -> None:
    run(
        "try:\n"
        "    torch._meta_registrations.nothing\n"
        "except AttributeError:\n"
        "    assert imported()\n"
        "else:\n"
        "    raise AssertionError('nothing was there')\n"
    )
