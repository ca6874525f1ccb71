"""The KV blocks of one request. The KV cache manager decides on them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

_NEVER = sys.maxsize
"""Value of `num_registered` for a request whose blocks other requests must not find."""


@dataclass(slots=True, eq=False)
class HeldBlocks:
    """The blocks that a request holds, and the hashes of its tokens."""

    ids: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    """Hashes of the full blocks of its known tokens, as far as they were needed."""
    num_registered: int = 0
    """How many of the blocks the pool knows by hash."""
    copy_source: int = -1
    """A block that is held until the request's own block of the next token has become a copy of it.

    -1 for none.
    """

    def take(
        self, ids: list[int], num_registered: int | None = None, copy_source: int = -1
    ) -> None:
        """Hold these blocks; before, there are none.

        num_registered: see the field of this name; None if other requests must not find the blocks.
        """
        self.ids, self.copy_source = ids, copy_source
        self.num_registered = _NEVER if num_registered is None else num_registered

    def grow(self, ids: list[int]) -> None:
        """Hold more blocks, behind the others."""
        self.ids += ids

    def registered(self, num_blocks: int) -> None:
        """Note that the pool knows this many of the blocks by hash."""
        self.num_registered = num_blocks

    def hide(self) -> None:
        """Let other requests find none of the blocks from now on."""
        self.num_registered = _NEVER

    def take_copy_source(self) -> int:
        """Return `copy_source`, which is held no longer."""
        source, self.copy_source = self.copy_source, -1
        return source

    def release(self) -> None:
        """Hold no block; the hashes stay."""
        self.ids, self.num_registered, self.copy_source = [], 0, -1

    def add_hashes(self, hashes: Iterable[bytes]) -> None:
        """Add the hashes of the next full blocks."""
        self.hashes += hashes

    def copy_hashes(self, other: HeldBlocks, most: int | None = None) -> None:
        """Take the hashes of another request with the same tokens, of `most` blocks or all."""
        self.hashes = other.hashes[:most]
