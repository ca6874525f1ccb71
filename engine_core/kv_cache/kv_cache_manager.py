"""KV blocks of requests: growth on demand, and reuse of equal prefixes.

A full block is known by hash(parent's hash, its tokens, extra keys): the chain makes equal hashes
mean equal prefixes (the idea is that of automatic prefix caching over paged attention, Kwon et al.
2023). SHA-256, so that nobody can build a prompt that collides with another's.

A block is made known as soon as the step that computes it is scheduled: steps run in order, and
within a step the KV of all tokens is written before it is read, layer by layer. A block with tokens
that are still in flight is made known when they have come back.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable

from sidestep.engine_core.kv_cache.block_pool import BlockPool
from sidestep.engine_core.requests.request import Request

_NEVER = sys.maxsize
"""As `num_registered`: none of this request's blocks are to be found by others."""


class KVCacheManager:
    """Hands blocks of one pool to requests."""

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def __repr__(self) -> str:
        return f"KVCacheManager({self.pool!r}, block_size={self.block_size})"

    @property
    def usage(self) -> float:
        """Share of blocks in use."""
        return self.pool.num_used / self.pool.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def enter(self, request: Request, *others: Request) -> bool:
        """Gives a request that has no blocks those of its cached prefix plus new ones for all its
        other known tokens, also where these are computed in several chunks: prompts that enter with
        only their first chunk take turns at preempting each other. All or nothing: False changes
        nothing. Sets `num_computed`.

        others: of its group, which get the full blocks of their common prompt from it (see
        `_fork`).
        """
        # Of cached tokens nothing would be computed that could be told.
        hits = [] if request.must_tell_of_prompt else self._match_prefix(request)
        num_hit = len(hits) * self.block_size
        wanted = (
            self.blocks_for(len(request.token_ids))
            - len(hits)
            + sum(map(self._num_own_blocks, others))
        )
        if wanted > self.pool.num_free - sum(map(self.pool.is_free, hits)):
            return False
        for block in hits:
            self.pool.share(block)
        request.block_ids = hits + self.pool.allocate(
            self.blocks_for(len(request.token_ids)) - len(hits)
        )
        request.num_computed = num_hit
        request.num_registered = len(hits) if self.enable_prefix_caching else _NEVER
        # A preempted request finds its own blocks again: that is not a hit anybody asks about.
        if self.enable_prefix_caching and not request.num_preemptions:
            self.num_queried_tokens += len(request.token_ids)
            self.num_hit_tokens += num_hit
        for other in others:
            self._fork(request, other)
        return True

    def num_blocks_to_enter(self, request: Request, *others: Request) -> int:
        """The most that `enter` may need."""
        return self.blocks_for(len(request.token_ids)) + sum(map(self._num_own_blocks, others))

    def grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """New blocks so that the request can hold `num_tokens` in all; None (and no change) if
        there are too few.
        """
        wanted = self.blocks_for(num_tokens) - len(request.block_ids)
        if wanted <= 0:
            return []
        if wanted > self.pool.num_free:
            return None
        blocks = self.pool.allocate(wanted)
        request.block_ids += blocks
        return blocks

    def remember(self, request: Request) -> None:
        """Makes known the full blocks whose tokens are known and computed."""
        full = min(request.num_computed, len(request.token_ids)) // self.block_size
        if full <= request.num_registered:
            return
        self._extend_hashes(request, full)
        for index in range(request.num_registered, full):
            self.pool.register(request.block_ids[index], request.block_hashes[index])
        request.num_registered = full

    def free(self, request: Request) -> None:
        """Takes all blocks back. The last ones are reused first: a prefix is worth more than what
        follows it.
        """
        self.pool.free(reversed(request.block_ids))
        if request.copy_source >= 0:
            self.pool.free([request.copy_source])
            request.copy_source = -1
        request.block_ids = []
        request.num_registered = 0

    def reset_prefix_cache(self, holders: Iterable[Request]) -> None:
        """Forgets all cached prefixes. Blocks in use stay in use but are found no more; nor is what
        their `holders` compute from now on, since it depends on what they computed before.
        """
        self.pool.reset_cache()
        for request in holders:
            request.num_registered = _NEVER

    def check_invariants(self, requests: list[Request]) -> None:
        """`requests` are all that may hold blocks. Raises AssertionError when the books do not
        balance.
        """
        self.pool.check_invariants()
        refs = [0] * self.pool.num_blocks
        for request in requests:
            assert len(set(request.block_ids)) == len(request.block_ids), (
                f"{request} holds a block twice"
            )
            for block in request.block_ids:
                refs[block] += 1
            if request.copy_source >= 0:
                refs[request.copy_source] += 1
        assert refs == self.pool._refs, "reference counts are not what requests hold"

    def num_shared(self, request: Request) -> int:
        """Blocks that one of a group has from the others. Not the one with the prompt's last token,
        which each of them computes for its logits, and with it writes again.
        """
        return (request.num_prompt - 1) // self.block_size

    def longest_of_group(self, request: Request, num: int) -> int:
        """Most tokens, prompt included, that it can have if the cache holds `num` like it."""
        shared = self.num_shared(request)
        return (shared + (self.pool.num_blocks - shared) // num) * self.block_size

    def _num_own_blocks(self, request: Request) -> int:
        return self.blocks_for(len(request.token_ids)) - self.num_shared(request)

    def _fork(self, source: Request, request: Request) -> None:
        """Blocks for one whose prompt the source computes: the source's full ones, and new ones of
        its own, of which the first must become a copy of what the source has there.
        """
        shared = source.block_ids[: self.num_shared(request)]
        for block in shared:
            self.pool.share(block)
        request.block_ids = shared + self.pool.allocate(self._num_own_blocks(request))
        request.num_computed = request.num_prompt - 1
        request.num_registered = len(shared) if self.enable_prefix_caching else _NEVER
        if request.num_computed % self.block_size:
            request.copy_source = source.block_ids[len(shared)]
            self.pool.share(request.copy_source)

    def branch(self, source: Request, request: Request) -> None:
        """In the place of what it had, blocks for a request that goes on from all that the source
        has computed.
        """
        full, rest = divmod(source.num_computed, self.block_size)
        shared, copied = source.block_ids[:full], source.block_ids[full] if rest else -1
        for block in (*shared, copied) if rest else shared:
            self.pool.share(block)
        self.free(request)
        request.block_ids = shared
        request.copy_source = copied
        request.num_computed = source.num_computed
        request.num_registered = source.num_registered

    def _match_prefix(self, request: Request) -> list[int]:
        """Cached blocks of its prefix; never of all its tokens, since the last one must be computed
        for its logits.
        """
        if not self.enable_prefix_caching:
            return []
        full = (len(request.token_ids) - 1) // self.block_size
        self._extend_hashes(request, full)
        hits: list[int] = []
        for block_hash in request.block_hashes[:full]:
            block = self.pool.lookup(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def _extend_hashes(self, request: Request, full: int) -> None:
        """Hashes the first `full` blocks of known tokens; those hashed before are kept."""
        hashes, size = request.block_hashes, self.block_size
        for index in range(len(hashes), full):
            parent = hashes[-1] if hashes else b""
            if index == request.num_public_tokens // size:
                parent = _salted(parent, request.cache_salt)
            tokens = array("i", request.token_ids[index * size : (index + 1) * size]).tobytes()
            hashes.append(hashlib.sha256(parent + tokens).digest())


def _salted(parent: bytes, cache_salt: str | None) -> bytes:
    """The parent of the first block that is not public, and so a part of every hash from there on:
    what must be equal besides the tokens. Hashed twice, so that no salt can be made whose hash is
    that of some block.
    """
    if cache_salt is None:
        return parent
    return hashlib.sha256(parent + hashlib.sha256(cache_salt.encode()).digest()).digest()
