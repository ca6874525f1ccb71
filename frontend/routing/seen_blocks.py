"""An approximate prefix tree of the blocks that a replica's prefix cache holds.

A block is known by a hash of its tokens and of the block before it, so a set of hashes is a tree of
prefixes. The tree forgets as the cache does: the least recently used blocks first, and the end of a
prompt before its beginning. So if a block is known, all blocks before it are known too, and
bisection finds the longest known prefix.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence

_ID_BYTES = 4


def block_hashes(
    token_ids: bytes, block_size: int, cache_salt: str | None = None, num_public_tokens: int = 0
) -> list[int]:
    """Return the hash of each full block of int32 token ids.

    As in the KV cache, the salt enters with the first block that is not wholly public. The hashes
    differ from process to process.
    """
    hashes: list[int] = []
    width, parent = block_size * _ID_BYTES, 0
    salted_from = num_public_tokens // block_size if cache_salt is not None else -1
    for index in range(len(token_ids) // width):
        if index == salted_from:
            parent = hash((parent, cache_salt))
        parent = hash((parent, token_ids[index * width : (index + 1) * width]))
        hashes.append(parent)
    return hashes


class SeenBlocks:
    """The hashes of one replica's blocks, at most `capacity` of them."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __repr__(self) -> str:
        return f"SeenBlocks({len(self)} of {self._capacity})"

    def match(self, hashes: Sequence[int]) -> int:
        """Return the number of known blocks at the beginning of a prompt."""
        return bisect_left(hashes, True, key=lambda h: h not in self._blocks)

    def add(self, hashes: Sequence[int]) -> None:
        """Add all blocks of a prompt as the most recently used ones."""
        blocks = self._blocks
        for block in reversed(hashes):
            blocks[block] = None
            blocks.move_to_end(block)
        while len(blocks) > self._capacity:
            blocks.popitem(last=False)
