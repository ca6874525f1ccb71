"""Prefetches into the L2 cache, in Triton.

The copy engine does them without a thread that waits. A kernel may ask before its `gdc_wait` for
weights that it will read, while the kernel before it leaves the memory idle.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def prefetch(addresses, BYTES: tl.constexpr):
    """Prefetch bytes from each address on. Bytes and addresses are multiples of 16."""
    tl.inline_asm_elementwise(
        f"cp.async.bulk.prefetch.L2.global [$1], {BYTES}; mov.u32 $0, 0;",
        "=r,l",
        [addresses],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
