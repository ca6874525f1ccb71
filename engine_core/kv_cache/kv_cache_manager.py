"""KV blocks of requests: growth on demand, and reuse of equal prefixes.

A full block is known by hash(parent's hash, its tokens, extra keys): the chain makes equal hashes
mean equal prefixes (the idea is that of automatic prefix caching over paged attention, Kwon et al.
2023). The hash is SHA-256, so that no prompt can be built that collides with another one.

A block is made known as soon as the step that computes it is scheduled: steps run in order, and
within a step the KV of all tokens is written before it is read, layer by layer. A block with tokens
that are still in flight is made known when they have come back.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable

from sidestep.engine_core.kv_cache.block_pool import BlockPool
from sidestep.engine_core.requests.request import Request


class KVCacheManager:
    """Allocates the blocks of one pool to requests."""

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
        """Share of blocks in use, from 0 to 1."""
        return self.pool.num_used / self.pool.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def enter(self, request: Request, *others: Request) -> bool:
        """Allocate the blocks of a request that has none: its cached prefix, and new blocks.

        The new blocks are for all its other known tokens, even if these are computed in several
        chunks: prompts that enter with only their first chunk take turns at preempting each other.
        Return False, and change nothing, if there are too few blocks. Sets `num_computed`.

        others: requests of its group, which share the full blocks of their common prompt with it
        (see `_fork`).
        """
        # prompt_logprobs needs every prompt token computed, so the cache is skipped.
        hits = [] if request.needs_whole_prompt else self._match_prefix(request)
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
        new = self.pool.allocate(self.blocks_for(len(request.token_ids)) - len(hits))
        request.blocks.take(hits + new, len(hits) if self.enable_prefix_caching else None)
        request.continue_at(num_hit)
        # A preempted request finds its own blocks again, which the metrics do not count as a hit.
        if self.enable_prefix_caching and not request.num_preemptions:
            self.num_queried_tokens += len(request.token_ids)
            self.num_hit_tokens += num_hit
        for other in others:
            self._fork(request, other)
        return True

    def num_blocks_to_enter(self, request: Request, *others: Request) -> int:
        """Return the most blocks that `enter` may need."""
        return self.blocks_for(len(request.token_ids)) + sum(map(self._num_own_blocks, others))

    def grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Return new blocks so that the request can hold `num_tokens` in all.

        Return None, and change nothing, if there are too few.
        """
        wanted = self.blocks_for(num_tokens) - len(request.blocks.ids)
        if wanted <= 0:
            return []
        if wanted > self.pool.num_free:
            return None
        blocks = self.pool.allocate(wanted)
        request.blocks.grow(blocks)
        return blocks

    def remember(self, request: Request) -> None:
        """Make known the full blocks whose tokens are known and computed."""
        full = min(request.num_computed, len(request.token_ids)) // self.block_size
        held = request.blocks
        if full <= held.num_registered:
            return
        self._extend_hashes(request, full)
        for index in range(held.num_registered, full):
            self.pool.register(held.ids[index], held.hashes[index])
        held.registered(full)

    def free(self, request: Request) -> None:
        """Take all blocks of a request back.

        Its last blocks are reused first: a prefix is worth more than what follows it.
        """
        self.pool.free(reversed(request.blocks.ids))
        if request.blocks.copy_source >= 0:
            self.pool.free([request.blocks.copy_source])
        request.blocks.release()

    def reset_prefix_cache(self, holders: Iterable[Request]) -> None:
        """Forget all cached prefixes.

        Blocks in use stay in use, but no request finds them any more. Blocks that their `holders`
        compute from now on are not found either, because they depend on what was computed before.
        """
        self.pool.reset_cache()
        for request in holders:
            request.blocks.hide()

    def check_invariants(self, requests: list[Request]) -> None:
        """Raise AssertionError when reference counts differ from what requests hold.

        requests: all that may hold blocks.
        """
        self.pool.check_invariants()
        refs = [0] * self.pool.num_blocks
        for request in requests:
            held = request.blocks
            assert len(set(held.ids)) == len(held.ids), f"{request} holds a block twice"
            for block in held.ids:
                refs[block] += 1
            if held.copy_source >= 0:
                refs[held.copy_source] += 1
        assert refs == self.pool._refs, "reference counts are not what requests hold"

    def num_shared(self, request: Request) -> int:
        """Return the number of blocks that a request of a group shares with the others.

        The block with the prompt's last token is not shared: each request computes that token for
        its logits, and so writes the block again.
        """
        return (request.num_prompt - 1) // self.block_size

    def longest_of_group(self, request: Request, num: int) -> int:
        """Return the most tokens a request can have if the cache holds `num` like it.

        The tokens include the prompt.
        """
        shared = self.num_shared(request)
        return (shared + (self.pool.num_blocks - shared) // num) * self.block_size

    def _num_own_blocks(self, request: Request) -> int:
        return self.blocks_for(len(request.token_ids)) - self.num_shared(request)

    def _fork(self, source: Request, request: Request) -> None:
        """Give a request the blocks of a source that computes the same prompt.

        It shares the source's full blocks and gets new ones for the rest. The first new block must
        become a copy of the source's block with that index.
        """
        shared = source.blocks.ids[: self.num_shared(request)]
        for block in shared:
            self.pool.share(block)
        new = self.pool.allocate(self._num_own_blocks(request))
        num_computed, copied = request.num_prompt - 1, -1
        if num_computed % self.block_size:
            copied = source.blocks.ids[len(shared)]
            self.pool.share(copied)
        num_registered = len(shared) if self.enable_prefix_caching else None
        request.blocks.take(shared + new, num_registered, copied)
        request.continue_at(num_computed)

    def branch(self, source: Request, request: Request) -> None:
        """Replace a request's blocks, so that it continues all that the source has computed."""
        full, rest = divmod(source.num_computed, self.block_size)
        held = source.blocks
        shared, copied = held.ids[:full], held.ids[full] if rest else -1
        for block in (*shared, copied) if rest else shared:
            self.pool.share(block)
        self.free(request)
        request.blocks.take(shared, held.num_registered, copied)
        request.continue_at(source.num_computed)

    def _match_prefix(self, request: Request) -> list[int]:
        """Return the cached blocks of the request's prefix.

        They never hold all its tokens, since the last token must be computed for its logits.
        """
        if not self.enable_prefix_caching:
            return []
        full = (len(request.token_ids) - 1) // self.block_size
        self._extend_hashes(request, full)
        hits: list[int] = []
        for block_hash in request.blocks.hashes[:full]:
            block = self.pool.lookup(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def _extend_hashes(self, request: Request, full: int) -> None:
        """Hash the first `full` blocks of known tokens; hashes from earlier calls are kept."""
        known, size = request.blocks.hashes, self.block_size
        parent, new = known[-1] if known else b"", list[bytes]()
        for index in range(len(known), full):
            if index == request.num_public_tokens // size:
                parent = _salted(parent, request.cache_salt)
            tokens = array("i", request.token_ids[index * size : (index + 1) * size]).tobytes()
            parent = hashlib.sha256(parent + tokens).digest()
            new.append(parent)
        request.blocks.add_hashes(new)


def _salted(parent: bytes, cache_salt: str | None) -> bytes:
    """Return the parent hash for the first block that is not public, with the salt in it.

    The salt is thereby part of every hash from that block on, so blocks are shared only if the
    salts are equal too. The salt is hashed twice, so that no salt can be made whose hash is that of
    some block.
    """
    if cache_salt is None:
        return parent
    return hashlib.sha256(parent + hashlib.sha256(cache_salt.encode()).digest()).digest()
