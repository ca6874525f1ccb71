"""Which kernel sums the parts of ranks fastest. **Not measured yet**: a guess, from what others report of H100s.

benchmarks/all_reduce.py --write measures and replaces this.

Number of ranks: up to how many bytes of a part, in rising order, which kernel of kernels.all_reduce_triton with how
many programs at most. Beyond the last torch.distributed (NCCL) is taken to be faster.
"""

from __future__ import annotations

from typing import Literal

Entry = tuple[int, Literal["one_shot", "two_shot"], int]

SUMS: dict[int, tuple[Entry, ...]] = {
    2: (
        (16777216, "one_shot", 128),),
    4: (
        (2097152, "one_shot", 128),
        (16777216, "two_shot", 128)),
    8: (
        (524288, "one_shot", 128),
        (16777216, "two_shot", 128)),
}
