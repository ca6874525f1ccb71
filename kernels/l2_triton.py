"""Instructions to a GPU's second cache, L2, for which Triton has no words."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def prefetch(addresses, BYTES: tl.constexpr):
    """Prefetch bytes from each address on. Bytes and addresses are multiples of 16.

    The copy engine does it without a thread that waits, from Hopper on. A kernel may ask before its
    `gdc_wait` for weights that it will read, while the kernel before it leaves the memory idle.
    """
    tl.inline_asm_elementwise(
        f"cp.async.bulk.prefetch.L2.global [$1], {BYTES}; mov.u32 $0, 0;",
        "=r,l",
        [addresses],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_block(address, BYTES: tl.constexpr):
    """Prefetch bytes from one address on. One thread of the program asks."""
    tl.inline_asm_elementwise(
        f"""{{
            .reg .pred one;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 one, thread, 0;
            @one cp.async.bulk.prefetch.L2.global [$1], {BYTES};
            mov.u32 $0, 0;
        }}""",
        "=r,l",
        [address],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def forget(lines):
    """Let L2 forget lines of 128 bytes, which it need not write to memory then; from Ampere on.

    lines: their addresses. Until somebody writes to them again, they have no values.
    """
    tl.inline_asm_elementwise(
        "{ discard.global.L2 [$1], 128; mov.u32 $0, 0; }",
        "=r,l",
        [lines],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
