"""Settings of the kernel tests.

They are filters for warnings, which are errors elsewhere, a marker for slow tests, which run only
when asked for, and a faster interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sidestep.kernels.gpu import Gpu, like_gpu
from tests.triton.support import INTERPRETED, LIMIT_S, skip_overflow_checks

# The interpreter computes with numpy, which warns where a GPU just computes: padding lanes (heads
# that fill up a tile, say) divide 0 by 0 and subtract infinity from infinity; their results are
# masked when stored.
_NUMPY = (
    "ignore:invalid value encountered in (divide|subtract)"
    ":RuntimeWarning:triton.runtime.interpreter"
)
# The interpreter of Triton 3.6 makes scalars of one-element arrays in a way that numpy 2.4 refuses.
_SCALAR = (
    "ignore:Conversion of an array with ndim > 0 to a scalar"
    ":DeprecationWarning:triton.runtime.interpreter"
)
# Triton 3.9 announces that 3.10 will fuse multiply and add no longer by default. The kernels rely
# on neither.
_FUSION = "ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning:triton.knobs"


@pytest.fixture
def h200() -> Iterator[None]:
    """Let tensors without memory stand for those on an H200."""
    with like_gpu(Gpu(90, 132), "meta"):
        yield


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes minutes; runs when asked for with -m slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        # These come first, so that a test's own filters come after them and prevail.
        item.add_marker(pytest.mark.filterwarnings(_NUMPY, _SCALAR, _FUSION), append=False)
        item.add_marker(pytest.mark.timeout(LIMIT_S), append=False)
        if "slow" in item.keywords and "slow" not in config.option.markexpr:
            item.add_marker(pytest.mark.skip(reason="slow: not asked for"))


@pytest.fixture(scope="session", autouse=True)
def interpreter_without_overflow_checks() -> None:
    """Disable the interpreter's overflow checks for all tests of kernels."""
    if INTERPRETED:
        skip_overflow_checks()
