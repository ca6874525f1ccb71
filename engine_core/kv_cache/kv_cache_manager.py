"""KV blocks of requests: growth on demand, and reuse of equal prefixes.

A full block is known by a hash of all tokens up to its end (prefix_hashes.py). It is made known as
soon as the step that computes it is scheduled: steps run in order, and within a step the KV of all
tokens is written before it is read, layer by layer. A block with tokens that are still in flight is
made known when they have come back.

A request has blocks in each cache group (ipc/model/cache_groups.py). In the group of full attention
it gets those of all its known tokens when it enters. In a group with a window it gets the blocks of
a row when the row is planned, and gives back those behind the window then: since steps run in
order, the next owner writes them after the last step that reads them. The blocks that it will need
there at once are reserved when it enters. A prefix is found if its last window is cached, and in a
model with recurrent layers a checkpoint behind it (state_cache.py).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sidestep.engine_core.kv_cache.block_pool import BlockPool
from sidestep.engine_core.kv_cache.prefix_hashes import extend_hashes, key_in_group
from sidestep.engine_core.kv_cache.state_cache import Saved, StateCache
from sidestep.engine_core.requests.held_blocks import HeldBlocks
from sidestep.engine_core.requests.request import Request
from sidestep.ipc.model.cache_groups import CacheGroups

_ONE_GROUP = CacheGroups()
_ANY = 1 << 31
"""More blocks than any request has."""


class _Window(NamedTuple):
    """A cache group with a window."""

    group: int
    tokens: int
    """The window."""
    most: int
    """Most blocks that a request needs at once."""


class _Hits(NamedTuple):
    """Cached blocks of a prefix."""

    num_blocks: int
    """Blocks of the prefix."""
    full: list[int]
    windows: list[tuple[_Window, int, list[int]]]
    """For each group with a window: the index of the first block, and the blocks."""


class KVCacheManager:
    """Allocates the blocks of one pool to requests."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        groups: CacheGroups = _ONE_GROUP,
        max_ahead: int = 0,
        num_states: int = 0,
    ) -> None:
        """Begin with free blocks.

        max_ahead: most tokens between the first that a request may still compute and the last that
        it gets blocks for; needed where a group has a window. num_states: states of recurrent
        layers; 0 for a model without such layers.
        """
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.groups, self._max_ahead = groups, max_ahead
        self._has_full = groups.has_full
        self._windows = [
            _Window(group, tokens, groups.most_in_window(tokens, block_size, max_ahead))
            for group, tokens in enumerate(groups.windows, 1)
        ]
        self.states = StateCache(num_states) if num_states else None
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def __repr__(self) -> str:
        return f"KVCacheManager({self.pool!r}, block_size={self.block_size})"

    @property
    def usage(self) -> float:
        """Share of blocks in use, from 0 to 1."""
        return self.pool.num_used / self.pool.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold this many tokens in one group."""
        return -(-num_tokens // self.block_size)

    def enter(self, request: Request, *others: Request, idle: Sequence[Request] = ()) -> bool:
        """Allocate the blocks of a request that has none: its cached prefix, and new blocks.

        The new blocks are for all its other known tokens, even if these are computed in several
        chunks: prompts that enter with only their first chunk take turns at preempting each other.
        Return False, and change nothing, if there are too few blocks. Sets `num_computed`.

        others: requests of its group, which share the full blocks of their common prompt with it
        (see `_fork`). idle: requests of its group that have no block until they take others over.
        """
        # prompt_logprobs needs every prompt token computed, so the cache is skipped.
        most = 0 if request.needs_whole_prompt else (len(request.token_ids) - 1) // self.block_size
        if others and (self._windows or self.states):  # these need its state near the prompt's end
            most = min(most, self.num_shared(request))
        found_in_blocks = self._match_prefix(request, most)
        hits = self._find(request, self._with_state(request, found_in_blocks))
        total = self.blocks_for(len(request.token_ids))
        new = (total - hits.num_blocks) * self._has_full
        reserved = sum(
            max(0, min(window.most, total - first) - len(found))
            for window, first, found in hits.windows
        )
        shared = [*hits.full, *(block for *_, found in hits.windows for block in found)]
        wanted = new + reserved + sum(map(self._num_own_blocks, others))
        if wanted > self.pool.num_free - sum(map(self.pool.is_free, shared)):
            return False
        num_states = 1 + len(others) + len(idle) + (hits.num_blocks > 0)
        if self.states and self.states.num_free < num_states:
            return False
        for block in shared:
            self.pool.share(block)
        held = request.blocks
        ids = hits.full + self.pool.allocate(new)
        held.take(
            ids,
            hits.num_blocks if self._windows else total,
            hits.num_blocks if self.enable_prefix_caching else None,
        )
        for window, first, found in hits.windows:
            held.take_window(window.group, first, found)
        self._reserve(held, reserved, total)
        if self.states:
            last = held.hashes[hits.num_blocks - 1] if hits.num_blocks else None
            held.own_state(self.states.enter(last), found_in_blocks)
            for one in idle:
                one.blocks.own_state(self.states.enter(None), 0)
        num_hit = hits.num_blocks * self.block_size
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
        return self.num_blocks_of(len(request.token_ids)) + sum(map(self._num_own_blocks, others))

    def grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Return new blocks of full attention so that the request can hold `num_tokens` in all.

        It gets blocks in the other groups too (see HeldBlocks.unsent), and gives back those behind
        their windows. Return None, and give it no block, if there are too few.
        """
        held, end = request.blocks, self.blocks_for(num_tokens)
        if end <= held.end:
            return []
        if held.windows:
            self._drop_behind(request)
        if self.num_missing(request, num_tokens) > 0:
            return None
        if held.windows:
            self._grow_windows(held, end)
        blocks = self.pool.allocate(max(0, end - len(held.ids))) if self._has_full else []
        held.grow(blocks, end)
        return blocks

    def _grow_windows(self, held: HeldBlocks, end: int) -> None:
        """Allocate the blocks before index `end` of groups with a window, and reserve further ones.

        There are enough free blocks for these groups and for the other one.
        """
        pool, of_full = self.pool, max(0, end - len(held.ids)) * self._has_full
        pool.reserve(-held.use_reserved())
        for own in held.windows:
            held.grow_window(own, pool.allocate(max(0, end - own.end)))
        left = max(held.goal, end)
        wanted = sum(
            max(0, min(window.most, left - own.first) - len(own.ids))
            for window, own in zip(self._windows, held.windows, strict=True)
        )
        # Blocks that it gave back may be in use by others, so there may be fewer.
        self._reserve(held, min(wanted, pool.num_free - of_full), held.goal)

    def num_missing(self, request: Request, num_tokens: int) -> int:
        """Return how many more blocks must be free before the request can hold `num_tokens`."""
        held, end = request.blocks, self.blocks_for(num_tokens)
        wanted = max(0, end - len(held.ids)) if self._has_full else 0
        if held.windows:
            wanted += sum(max(0, end - own.end) for own in held.windows)
        return wanted - self.pool.num_free - held.num_reserved

    def remember(self, request: Request) -> None:
        """Make known the full blocks whose tokens are known and computed."""
        full = min(request.num_computed, len(request.token_ids)) // self.block_size
        held = request.blocks
        if full <= held.num_registered:
            return
        extend_hashes(request, full, self.block_size)
        for index in range(held.num_registered, full):
            if self._has_full:
                self.pool.register(held.ids[index], held.hashes[index])
            for own in held.windows:
                if own.first <= index:
                    block = own.ids[index - own.first]
                    self.pool.register(block, key_in_group(held.hashes[index], own.group))
        held.registered(full)

    def free(self, request: Request) -> None:
        """Take all blocks of a request back.

        Its last blocks are reused first: a prefix is worth more than what follows it.
        """
        held = request.blocks
        for own in held.windows:
            self.pool.free(reversed(own.ids))
        self.pool.free(reversed(held.ids))
        self.pool.free([block for _, block in held.copy_sources])
        self.pool.reserve(-held.num_reserved)
        if self.states and held.state >= 0:
            self.states.free(held.state)
        held.release()

    def reset_prefix_cache(self, holders: Iterable[Request]) -> None:
        """Forget all cached prefixes.

        Blocks in use stay in use, but no request finds them any more. Blocks that their `holders`
        compute from now on are not found either, because they depend on what was computed before.
        """
        self.pool.reset_cache()
        if self.states:
            self.states.reset()
        for request in holders:
            request.blocks.hide()

    def forget_behind(self, request: Request) -> None:
        """Forget the blocks and checkpoints behind the tokens that a request has computed.

        They were made known on the promise of rows that will not be computed. Blocks of windows
        may belong to the request no longer, so all of them are found by their hashes.
        """
        hashes = request.blocks.hashes
        for block_hash in hashes[max(0, request.num_computed) // self.block_size :]:
            for group in range(self.groups.count):
                self.pool.unregister(key_in_group(block_hash, group) if group else block_hash)
            if self.states:
                self.states.unregister(block_hash)

    def check_invariants(self, requests: list[Request]) -> None:
        """Raise AssertionError when reference counts differ from what requests hold.

        requests: all that may hold blocks.
        """
        self.pool.check_invariants()
        refs, num_reserved = [0] * self.pool.num_blocks, 0
        for request in requests:
            held = request.blocks
            ids = list(held.all())
            assert len(set(ids)) == len(ids), f"{request} holds a block twice"
            for block in (*ids, *(source for _, source in held.copy_sources)):
                refs[block] += 1
            num_reserved += held.num_reserved
        assert refs == self.pool._refs, "reference counts are not what requests hold"
        assert num_reserved == self.pool.num_reserved, "blocks are reserved for nobody"
        if self.states:
            self.states.check_invariants([request.blocks.state for request in requests])

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
        return self._longest(self.num_shared(request), num)

    @property
    def longest(self) -> int:
        """The most tokens that one request alone can have."""
        return self._longest(0, 1)

    def num_blocks_of(self, num_tokens: int) -> int:
        """Return the number of blocks with which one request alone can have this many tokens."""
        return self.groups.blocks_of(num_tokens, self.block_size, self._max_ahead)

    def _longest(self, shared: int, num: int) -> int:
        """Return the most tokens of each of `num` requests that share this many blocks."""

        def wanted(blocks: int) -> int:
            full = shared + num * max(0, blocks - shared)
            return full * self._has_full + num * self._num_in_windows(blocks)

        return (bisect_right(range(_ANY), self.pool.num_blocks, key=wanted) - 1) * self.block_size

    def _num_in_windows(self, blocks: int) -> int:
        """Return the most blocks that a request with `blocks` in a full group has in the others."""
        return sum(min(window.most, blocks) for window in self._windows)

    def _num_own_blocks(self, request: Request) -> int:
        total = self.blocks_for(len(request.token_ids))
        full = (total - self.num_shared(request)) * self._has_full
        return full + self._num_in_windows(total)

    def _reserve(self, held: HeldBlocks, count: int, goal: int) -> None:
        """Reserve blocks for a request that has none reserved."""
        self.pool.reserve(count)
        held.reserve(count, goal)

    def _first_kept(self, window: _Window, position: int) -> int:
        """Return the index of the first block that a token at this position attends to."""
        return max(0, position - window.tokens + 1) // self.block_size

    def _drop_behind(self, request: Request) -> None:
        """Take back the blocks that no token to come attends to."""
        held = request.blocks
        # Drafts in flight may be rejected, so the next token may be any behind the known ones.
        position = min(request.num_computed, len(request.token_ids) - 1)
        for window, own in zip(self._windows, held.windows, strict=False):
            self.pool.free(own.drop_behind(self._first_kept(window, position)))

    def _fork(self, source: Request, request: Request) -> None:
        """Give a request the blocks of a source that computes the same prompt.

        It shares the source's full blocks and gets new ones for the rest. The first new block must
        become a copy of the source's block with that index. Blocks of groups with a window are
        reserved (see `fork_windows`).
        """
        shared = source.blocks.ids[: self.num_shared(request)]
        for block in shared:
            self.pool.share(block)
        total, num_computed = self.blocks_for(len(request.token_ids)), request.num_prompt - 1
        new = self.pool.allocate((total - self.num_shared(request)) * self._has_full)
        num_registered = self.num_shared(request) if self.enable_prefix_caching else None
        held = request.blocks
        held.take(shared + new, 0 if self._windows else total, num_registered)
        if num_computed % self.block_size and self._has_full:
            self._copy_later(held, 0, source.blocks.ids[len(shared)])
        self._reserve(held, self._num_in_windows(total), total)
        if self.states:
            held.own_state(self.states.enter(None), 0)
        request.continue_at(num_computed)

    def fork_windows(self, source: Request, request: Request) -> None:
        """Give a fork its blocks in groups with a window, if it has none yet.

        The source's last row of the prompt has just been planned.
        """
        held = request.blocks
        if self._windows and not held.windows:
            self._share_windows(source, held, request.num_computed)
            held.grow([], self.num_shared(request))

    def branch(self, source: Request, request: Request) -> None:
        """Replace a request's blocks, so that it continues all that the source has computed."""
        full, rest = divmod(source.num_computed, self.block_size)
        held, taken = source.blocks, HeldBlocks()
        taken.take(held.ids[:full], full, held.num_registered)
        for block in taken.ids:
            self.pool.share(block)
        if rest and self._has_full:
            self._copy_later(taken, 0, held.ids[full])
        self._share_windows(source, taken, source.num_computed)
        if self.states:
            taken.own_state(request.blocks.give_state(), 0)
            self.states.copy(held.state, taken.state)
        self.free(request)
        request.blocks.replace(taken)
        request.continue_at(source.num_computed)

    def _share_windows(self, source: Request, held: HeldBlocks, num_computed: int) -> None:
        """Share a source's blocks that the tokens behind the computed ones attend to.

        A block that is not full is copied later.
        """
        full, rest = divmod(num_computed, self.block_size)
        for window, own in zip(self._windows, source.blocks.windows, strict=True):
            first = self._first_kept(window, num_computed)
            ids = own.of(first, full)
            for block in ids:
                self.pool.share(block)
            held.take_window(window.group, first, ids)
            if rest:
                self._copy_later(held, window.group, own.of(full, full + 1)[0])

    def _copy_later(self, held: HeldBlocks, group: int, source: int) -> None:
        """Keep a block until it has been copied to the request's own block."""
        self.pool.share(source)
        held.copy_later(group, source)

    def _match_prefix(self, request: Request, most: int) -> int:
        """Return the number of blocks of the request's longest cached prefix, at most `most`.

        They never hold all its tokens, since the last token must be computed for its logits.
        """
        if not self.enable_prefix_caching:
            return 0
        count = most
        extend_hashes(request, count, self.block_size)
        hashes, lookup = request.blocks.hashes, self.pool.lookup
        if self._has_full:
            found = (i for i in range(count) if lookup(hashes[i]) is None)
            count = next(found, count)
        while (missing := self._first_missing(hashes, count)) < count:
            count = missing  # every longer prefix needs that block too
        return count

    def _first_missing(self, hashes: list[bytes], count: int) -> int:
        """Return the first missing block among those that windows reach behind `count` blocks.

        Return `count` if all of them are cached.
        """
        reached = (
            index
            for window in self._windows
            for index in range(self._first_kept(window, count * self.block_size), count)
            if self.pool.lookup(key_in_group(hashes[index], window.group)) is None
        )
        return min(reached, default=count)

    def _with_state(self, request: Request, count: int) -> int:
        """Return how many of the first `count` blocks, which are cached, end with a checkpoint."""
        hashes, states = request.blocks.hashes, self.states
        while (
            states
            and count
            and not (states.has(hashes[count - 1]) and self._first_missing(hashes, count) == count)
        ):
            count -= 1
        return count

    def saves(self, request: Request, num_tokens: int) -> list[Saved]:
        """Return the states to be saved within a request's next row, which is planned now.

        Checkpoints are where the known tokens' last full block ends, and where others have begun to
        differ from them: where the blocks that were found when it entered end. Besides, forks take
        over the state before the prompt's last token.
        """
        states, held, first = self.states, request.blocks, request.num_computed
        if states is None:
            return []
        found = []
        if self.enable_prefix_caching and not held.is_hidden:
            last_full = (len(request.token_ids) - 1) // self.block_size
            for blocks in {last_full, held.branch}:
                if first < blocks * self.block_size <= first + num_tokens:
                    extend_hashes(request, blocks, self.block_size)
                    state = states.save(held.hashes[blocks - 1])
                    if state is not None:
                        found.append(Saved(blocks * self.block_size - first, state))
        group, before_last = request.group, request.num_prompt - 1
        if group is not None and request is group.source and before_last:
            for fork in group.forks:
                if first == before_last:
                    states.copy(held.state, fork.blocks.state)
                elif first < before_last <= first + num_tokens:
                    found.append(Saved(before_last - first, fork.blocks.state))
        return found

    def _find(self, request: Request, count: int) -> _Hits:
        """Return the cached blocks of a prefix of `count` blocks that `_match_prefix` has found."""
        hashes = request.blocks.hashes

        def found(group: int, first: int) -> list[int]:
            blocks = (self.pool.lookup(key_in_group(one, group)) for one in hashes[first:count])
            return [block for block in blocks if block is not None]

        firsts = [self._first_kept(window, count * self.block_size) for window in self._windows]
        return _Hits(
            count,
            found(0, 0) if self._has_full else [],
            [
                (window, first, found(window.group, first))
                for window, first in zip(self._windows, firsts, strict=True)
            ],
        )
