"""Tapes of kernels in C: what they record, what they refuse, and whose memory they use."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sidestep.kernels.native import library, rows
from sidestep.kernels.native.library import NoLibraryError, load
from sidestep.kernels.native.tape import Tape, TapeMemory, empty


@pytest.fixture(autouse=True)
def kernels() -> None:
    try:
        load("tape.c")
    except NoLibraryError as error:
        pytest.skip(str(error))


def activated_twice(x: Tensor) -> Tensor:
    """Compute something with several kernels, in which results take one another's memory."""
    for _ in range(4):
        made = rows.silu_mul(x)
        assert made is not None
        assert rows.add(x[:, :32], made) and rows.add(x[:, 32:], made)
    assert made is not None
    return made


def test_a_tape_computes_with_what_is_in_its_memory_now() -> None:
    memory = TapeMemory()
    x, other = torch.randn(5, 64), torch.randn(5, 64)
    tape, given = Tape(memory), memory.empty((5, 64), torch.float32)
    given.copy_(x)
    with tape.recorded():
        made = activated_twice(given)
    assert tape.other is None
    assert torch.equal(made, activated_twice(x))
    for again in (other, torch.randn(5, 64)):
        given.copy_(again)
        tape.play()
        assert torch.equal(made, activated_twice(again.clone()))


def test_an_operation_of_torch_is_named_and_views_are_none() -> None:
    tape = Tape(TapeMemory())
    x = torch.randn(4, 8)
    with tape.recorded():
        rows.silu_mul(x[1:3].view(2, 8).t().t())
    assert tape.other is None
    tape = Tape(TapeMemory())
    with tape.recorded():
        x.mul_(2)
        x.exp()
    assert tape.other == "aten::mul_"
    with pytest.raises(AssertionError, match="cannot be played"):
        tape.play()


def test_memory_of_torch_is_refused_since_it_would_not_stay() -> None:
    x = torch.randn(4, 8)
    allocations: dict[str, Callable[[], Tensor]] = {
        "aten::new_empty": lambda: x.new_empty(4, 8),
        "aten::empty": lambda: torch.empty(4, 8),
        "aten::clone": lambda: x.clone(),
    }
    for name, allocate in allocations.items():
        tape = Tape(TapeMemory())
        with tape.recorded():
            rows.add(allocate(), x)
        assert tape.other == name


RECORD = """
import sys, torch
from pathlib import Path
from sidestep.kernels.native import library, rows
from sidestep.kernels.native.tape import Tape, TapeMemory
library._folder = Path(sys.argv[1])
with torch.inference_mode(), Tape(TapeMemory()).recorded():
    rows.silu_mul(torch.ones(2, 8)[:1])
print("torch._dynamo" in sys.modules)
"""


def test_the_first_step_does_not_wait_for_torchs_compiler_to_be_imported() -> None:
    command = [sys.executable, "-c", RECORD, str(library._folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout == "False\n"


def test_another_thread_is_not_recorded() -> None:
    tape, x = Tape(TapeMemory()), torch.randn(4, 8)
    with tape.recorded():
        rows.silu_mul(x)
        thread = threading.Thread(target=lambda: (rows.silu_mul(x), x + 1))
        thread.start()
        thread.join()
    assert tape.other is None and repr(tape) == "Tape(1 calls)"
    rows.silu_mul(x)
    assert repr(tape) == "Tape(1 calls)", "it ends with the context"


def test_memory_serves_again_when_a_tensor_and_its_views_are_gone() -> None:
    memory = TapeMemory()
    first = memory.empty((3, 100), torch.float32)
    place, view = first.data_ptr(), first[1:]
    del first
    assert memory.empty((3, 100), torch.float32).data_ptr() != place, "a view needs it"
    del view
    assert memory.empty((300,), torch.float32).data_ptr() == place
    assert memory.nbytes == 2 * 2048


def test_without_a_tape_memory_is_torchs() -> None:
    made = empty((2, 3), torch.bfloat16)
    assert made.shape == (2, 3) and made.dtype == torch.bfloat16
