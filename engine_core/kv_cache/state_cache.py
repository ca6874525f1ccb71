"""States of recurrent layers: one for each running request, and checkpoints for prefixes.

A *state* is memory for the states of all recurrent layers of one request. A running request owns
one, which its rows read and write. A *checkpoint* is a state that has been saved where a block of
tokens ends. It is known by that block's hash, as the block is, and is dropped when another state
needs the memory: the least recently used one first.

Steps name the states that are copied before their rows run, and those that rows save. A state that
a step copies or saves stays in use until the step is put together, so that no other part of the
same step gets its memory. A checkpoint is known from then on, since copies come before rows.
"""

from __future__ import annotations

from typing import NamedTuple

from sidestep.engine_core.kv_cache.block_pool import BlockPool


class Saved(NamedTuple):
    """A state that is saved within a row."""

    num_tokens: int
    """Tokens of the row up to there."""
    state: int


class StateCache:
    """Allocates the states of one pool."""

    def __init__(self, num_states: int) -> None:
        self._pool = BlockPool(num_states)
        self._copies: list[tuple[int, int]] = []
        """(source, target) of the next step."""
        self._held: list[int] = []
        """States that are in use until the next step is put together."""
        self._new: list[tuple[int, bytes]] = []
        """Checkpoints that the next step saves, and their hashes."""

    def __repr__(self) -> str:
        return f"StateCache({self._pool!r})"

    @property
    def num_free(self) -> int:
        """States that are no running request's."""
        return self._pool.num_free

    def has(self, block_hash: bytes) -> bool:
        """Return whether there is a checkpoint behind the block with this hash."""
        return self._pool.lookup(block_hash) is not None

    def enter(self, block_hash: bytes | None) -> int:
        """Return a state of a request's own, which begins as a checkpoint; None for an empty one.

        The caller has checked `num_free`, which must be 2 where a checkpoint is free.
        """
        if block_hash is None:
            (own,) = self._pool.allocate(1)
            return own
        source = self._pool.lookup(block_hash)
        assert source is not None
        self._hold(source)
        (own,) = self._pool.allocate(1)
        self._copies.append((source, own))
        return own

    def copy(self, source: int, target: int) -> None:
        """Let one request's state become a copy of another's, before the next step."""
        # The source may itself begin with that step. No copy then reads what another writes.
        source = next((one for one, copied in self._copies if copied == source), source)
        self._hold(source)
        self._hold(target)
        self._copies.append((source, target))

    def save(self, block_hash: bytes) -> int | None:
        """Return the state that the next step saves a checkpoint in, or None if there is no room.

        block_hash: that of the block which ends there.
        """
        if self.has(block_hash) or not self._pool.num_free:
            return None
        if any(known == block_hash for _, known in self._new):
            return None
        (state,) = self._pool.allocate(1)
        self._held.append(state)
        self._new.append((state, block_hash))
        return state

    def take_copies(self) -> list[tuple[int, int]]:
        """Return (source, target) of all copies of the step that is put together now.

        From now on its checkpoints are known, and other steps may use the memory.
        """
        copies, self._copies = self._copies, []
        for state, block_hash in self._new:
            self._pool.register(state, block_hash)
        self._pool.free(self._held)
        self._held, self._new = [], []
        return copies

    def free(self, state: int) -> None:
        """Take back the state of a request, and drop the copies to it that no step has made yet.

        Otherwise these would keep two states in use, for which the next step may have to wait.
        """
        for source, target in [copy for copy in self._copies if copy[1] == state]:
            self._copies.remove((source, target))
            self._held.remove(source)
            self._held.remove(target)
            self._pool.free([source, target])
        self._pool.free([state])

    def unregister(self, block_hash: bytes) -> None:
        """Forget the checkpoint behind the block with this hash, if there is one."""
        self._pool.unregister(block_hash)

    def reset(self) -> None:
        """Forget all checkpoints."""
        self._pool.reset_cache()
        self._new = []

    def check_invariants(self, owned: list[int]) -> None:
        """Raise AssertionError unless requests own exactly the states in use. owned: their states.

        Call it between steps.
        """
        self._pool.check_invariants()
        refs = [0] * self._pool.num_blocks
        for state in (*owned, *self._held):
            refs[state] += 1
        assert refs == self._pool._refs, "states in use are not what requests own"
        assert len(set(owned)) == len(owned), "two requests own one state"

    def _hold(self, state: int) -> None:
        """Keep a state in use until the next step is put together."""
        self._pool.share(state)
        self._held.append(state)
