"""KV blocks: who uses them, which are free, and what content the free ones still hold.

A block is free when nobody references it. A free block that is known by a hash keeps its content
until it is handed out again; those that hold nothing worth keeping are handed out first, then the
least recently freed. Every operation is O(1) per block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class BlockPool:
    """Block ids 0..num_blocks-1, each with a reference count and, if its content is known, a
    hash.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        # In the order of reuse. An ordered dict gives removal from the middle (a prefix hit) in
        # O(1).
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    def __repr__(self) -> str:
        return f"BlockPool({self.num_used}/{self.num_blocks} used, {len(self._by_hash)} cached)"

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, cached ones included."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody references."""
        return self.num_blocks - len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks, free or not, whose content is known by a hash."""
        return len(self._by_hash)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each. The caller has looked at `num_free`."""
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def lookup(self, block_hash: bytes) -> int | None:
        """The block with this content."""
        return self._by_hash.get(block_hash)

    def is_free(self, block: int) -> bool:
        """Whether nobody references it."""
        return self._refs[block] == 0

    def is_last(self, block: int, count: int) -> bool:
        """Whether it is free after so many references have been dropped."""
        return self._refs[block] == count

    def share(self, block: int) -> None:
        """One more reference; a free block leaves the free list with its content."""
        if self._refs[block] == 0:
            del self._free[block]
        self._refs[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Drops one reference of each, in this order: of those that become free, the first is
        reused first.
        """
        for block in blocks:
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def register(self, block: int, block_hash: bytes) -> None:
        """Makes a block's content known; of blocks with equal content, the first stays the known
        one.
        """
        if self._hash_of[block] is None and block_hash not in self._by_hash:
            self._hash_of[block] = block_hash
            self._by_hash[block_hash] = block

    def reset_cache(self) -> None:
        """Forgets all contents; blocks in use stay in use."""
        for block in self._by_hash.values():
            self._hash_of[block] = None
        self._by_hash.clear()

    def check_invariants(self) -> None:
        """Raises AssertionError when the books do not balance."""
        assert all(refs >= 0 for refs in self._refs), (
            "a block was freed more often than it was referenced"
        )
        free = {block for block, refs in enumerate(self._refs) if refs == 0}
        assert free == set(self._free), "the free list is not the set of blocks without references"
        known = {h: b for b, h in enumerate(self._hash_of) if h is not None}
        assert known == self._by_hash, "hashes by block and blocks by hash differ"

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of[block]
        if block_hash is not None:
            self._hash_of[block] = None
            del self._by_hash[block_hash]
