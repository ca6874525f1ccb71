"""A kernel that traps, as one with a bug does: the device reports an error from then on."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _trap_if(flag):
    """Trap if the flag is not 0."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $1, 0; @p trap; mov.b32 $0, $1; }",
        "=r,r",
        [tl.load(flag)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def trap_if(flag: Tensor) -> None:
    """Launch the kernel. flag: int32 [1] on the device."""
    _trap_if[(1,)](flag)
