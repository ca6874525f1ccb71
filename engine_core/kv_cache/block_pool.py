"""KV blocks: their reference counts, the free list, and the content that free blocks still hold.

A block is free when it has no references. A free block that is known by a hash keeps its content
until it is allocated again. Blocks without content worth keeping are allocated first, then the
least recently freed. Every operation is O(1) per block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class BlockPool:
    """Block ids 0..num_blocks-1, each with a reference count and, if known, its content's hash."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        # The free blocks in the order of reuse. An ordered dict removes a block from the middle (a
        # prefix hit) in O(1).
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.num_reserved = 0
        """Free blocks that are kept for requests which will allocate them."""

    def __repr__(self) -> str:
        return f"BlockPool({self.num_used}/{self.num_blocks} used, {len(self._by_hash)} cached)"

    @property
    def num_free(self) -> int:
        """Blocks that anyone can allocate, cached ones included."""
        return len(self._free) - self.num_reserved

    @property
    def num_used(self) -> int:
        """Blocks that have references, or are reserved."""
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Blocks, free or not, whose content is known by a hash."""
        return len(self._by_hash)

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks with one reference each. The caller has checked `num_free`."""
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def reserve(self, count: int) -> None:
        """Keep this many more free blocks for a request; fewer, if the count is negative.

        The caller has checked `num_free`. Which blocks they are is open until they are allocated.
        """
        self.num_reserved += count

    def lookup(self, block_hash: bytes) -> int | None:
        """Return the block with this content; None if there is none."""
        return self._by_hash.get(block_hash)

    def is_free(self, block: int) -> bool:
        """Return whether the block has no references."""
        return self._refs[block] == 0

    def is_last(self, block: int, count: int) -> bool:
        """Return whether the block is free after `count` of its references have been dropped."""
        return self._refs[block] == count

    def share(self, block: int) -> None:
        """Add a reference. A free block leaves the free list and keeps its content."""
        if self._refs[block] == 0:
            del self._free[block]
        self._refs[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each block, in this order.

        The first block that becomes free is reused first.
        """
        for block in blocks:
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def register(self, block: int, block_hash: bytes) -> None:
        """Make a block's content known by its hash.

        If blocks have equal content, the first one that was registered stays the known one.
        """
        if self._hash_of[block] is None and block_hash not in self._by_hash:
            self._hash_of[block] = block_hash
            self._by_hash[block_hash] = block

    def unregister(self, block_hash: bytes) -> None:
        """Forget the content with this hash, if a block is known to have it."""
        block = self._by_hash.pop(block_hash, None)
        if block is not None:
            self._hash_of[block] = None
            if self._refs[block] == 0:
                self._free.move_to_end(block, last=False)

    def reset_cache(self) -> None:
        """Forget all contents. Blocks in use stay in use."""
        for block in self._by_hash.values():
            self._hash_of[block] = None
        self._by_hash.clear()

    def check_invariants(self) -> None:
        """Raise AssertionError when counts, free list and hashes contradict one another."""
        assert all(refs >= 0 for refs in self._refs), (
            "a block was freed more often than it was referenced"
        )
        free = {block for block, refs in enumerate(self._refs) if refs == 0}
        assert free == set(self._free), "the free list is not the set of blocks without references"
        known = {h: b for b, h in enumerate(self._hash_of) if h is not None}
        assert known == self._by_hash, "hashes by block and blocks by hash differ"
        assert 0 <= self.num_reserved <= len(self._free), "more blocks are reserved than are free"

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of[block]
        if block_hash is not None:
            self._hash_of[block] = None
            del self._by_hash[block_hash]
