"""Stand-ins of modules that torch's functions without memory import, in processes of their own."""

from __future__ import annotations

from tests.processes import run_python

BEGIN = """
import sys
from sidestep.executor.processes.torch_without import do_without_long_imports
do_without_long_imports()
import torch
def imported(name):
    return hasattr(sys.modules[name], "__file__")
x = torch.zeros(2, 6, device="meta")
found = torch.cat([torch.empty_like(x), x]).view(4, 2, 3).permute(1, 0, 2) * x[0, :3] + 1
assert found.shape == (2, 4, 3), found.shape
assert torch.nn.functional.linear(x, torch.zeros(5, 6, device="meta")).shape == (2, 5)
assert not any(map(imported, ("sympy", "torch._dynamo", "torch.fx.experimental.symbolic_shapes")))
"""


def run(program: str) -> None:
    run_python(BEGIN + program)


def test_sizes_are_numbers_without_algebra() -> None:
    run("")


def test_a_name_that_a_stand_in_lacks_is_imported() -> None:
    run(
        "from torch.fx.experimental.symbolic_shapes import ShapeEnv\n"
        "import sympy.core\n"
        "assert ShapeEnv is not None and sympy.Integer(3) + 4 == 7\n"
        "assert imported('sympy') and not imported('torch._dynamo')\n"
        "assert torch.empty_like(x).shape == x.shape\n"
    )


def test_a_mismatch_is_still_an_error() -> None:
    run(
        "try:\n"
        "    x @ x\n"
        "except RuntimeError as error:\n"
        "    assert '[2, 6]' in str(error), error\n"
        "else:\n"
        "    raise AssertionError('2 x 6 times 2 x 6')\n"
    )
