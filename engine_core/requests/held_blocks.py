"""The KV blocks of one request. The KV cache manager decides on them.

A request holds blocks for each cache group (ipc/model/cache_groups.py): for the group of full
attention the blocks of all its tokens, for a group with a window those that the window reaches.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

_NEVER = sys.maxsize
"""Value of `num_registered` for a request whose blocks other requests must not find."""


class Placed(NamedTuple):
    """An entry of a block table."""

    group: int
    place: int
    """Index of the block among those of the request's tokens."""
    block: int


@dataclass(slots=True, eq=False)
class WindowBlocks:
    """The blocks of a group with a window: consecutive ones."""

    group: int
    first: int = 0
    """Index of the first block that is held; the ones before it have been given back."""
    ids: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Index behind the last block."""
        return self.first + len(self.ids)

    def grow(self, ids: list[int]) -> None:
        """Hold more blocks behind the others."""
        self.ids += ids

    def drop_behind(self, first: int) -> list[int]:
        """Return the blocks before index `first`, which are held no longer."""
        dropped = self.ids[: max(0, first - self.first)]
        del self.ids[: len(dropped)]
        self.first = max(self.first, first)
        return dropped

    def of(self, first: int, end: int) -> list[int]:
        """Return the ids of these blocks, all of which are held."""
        assert self.first <= first
        return self.ids[first - self.first : end - self.first]


@dataclass(slots=True, eq=False)
class HeldBlocks:
    """The blocks that a request holds, and the hashes of its tokens."""

    ids: list[int] = field(default_factory=list)
    """Blocks of the group of full attention; empty in a model that has no such layer."""
    windows: list[WindowBlocks] = field(default_factory=list)
    """Blocks of the other groups; empty while the request holds none."""
    end: int = 0
    """Index behind the last block that the request holds in every group."""
    num_reserved: int = 0
    """Blocks of groups with a window that the pool keeps for this request."""
    goal: int = 0
    """Blocks of all tokens that were known when it entered, for which blocks are reserved."""
    unsent: list[Placed] = field(default_factory=list)
    """Entries in tables of groups with a window that the workers have not been told of."""
    hashes: list[bytes] = field(default_factory=list)
    """Hashes of the full blocks of its known tokens, as far as they were needed."""
    num_registered: int = 0
    """How many of the blocks the pool knows by hash."""
    copy_sources: list[tuple[int, int]] = field(default_factory=list)
    """(group, block): blocks that are held until the request's own blocks of the next token have
    become copies of them."""

    state: int = -1
    """State of recurrent layers that the request owns; -1 for none."""
    branch: int = 0
    """Blocks of its longest prefix that was cached when it entered, checkpoint or not."""

    @property
    def is_hidden(self) -> bool:
        """Whether other requests must not find the blocks."""
        return self.num_registered == _NEVER

    def take(self, ids: list[int], end: int, num_registered: int | None = None) -> None:
        """Hold these blocks of full attention; before, there are none.

        end, num_registered: see the fields of these names; num_registered is None if other requests
        must not find the blocks.
        """
        self.ids, self.end = ids, end
        self.num_registered = _NEVER if num_registered is None else num_registered

    def take_window(self, group: int, first: int, ids: list[int]) -> None:
        """Hold these blocks of a group with a window, of which none is held."""
        self.windows.append(WindowBlocks(group, first, ids))
        self.unsent += (Placed(group, index, block) for index, block in enumerate(ids, first))

    def replace(self, other: HeldBlocks) -> None:
        """Hold what another object says, in place of nothing; the hashes stay."""
        self.take(other.ids, other.end, other.num_registered)
        self.windows, self.unsent = other.windows, other.unsent
        self.copy_sources, self.goal, self.state = other.copy_sources, 0, other.state

    def own_state(self, state: int, branch: int) -> None:
        """Own a state of recurrent layers; see the fields."""
        self.state, self.branch = state, branch

    def give_state(self) -> int:
        """Return the state, which is owned no longer."""
        state, self.state = self.state, -1
        return state

    def reserve(self, count: int, goal: int) -> None:
        """Note that the pool keeps `count` blocks; see the fields `num_reserved` and `goal`."""
        self.num_reserved, self.goal = count, goal

    def use_reserved(self) -> int:
        """Return the number of blocks that the pool keeps, which it keeps no longer."""
        count, self.num_reserved = self.num_reserved, 0
        return count

    def grow(self, ids: list[int], end: int) -> None:
        """Hold more blocks of full attention, behind the others. end: see the field."""
        self.ids += ids
        self.end = end

    def grow_window(self, window: WindowBlocks, ids: list[int]) -> None:
        """Hold more blocks of a group with a window, behind the others."""
        self.unsent += (
            Placed(window.group, index, block) for index, block in enumerate(ids, window.end)
        )
        window.grow(ids)

    def take_unsent(self) -> list[Placed]:
        """Return `unsent`; the caller tells the workers of it."""
        sent, self.unsent = self.unsent, []
        return sent

    def registered(self, num_blocks: int) -> None:
        """Note that the pool knows this many of the blocks by hash."""
        self.num_registered = num_blocks

    def hide(self) -> None:
        """Let other requests find none of the blocks from now on."""
        self.num_registered = _NEVER

    def copy_later(self, group: int, source: int) -> None:
        """Hold a block until the request's own block of the next token is a copy of it."""
        self.copy_sources.append((group, source))

    def take_copies(self, index: int) -> list[tuple[int, int]]:
        """Return (source, target) of each of `copy_sources`, which are held no longer.

        index: that of the targets, the request's own blocks.
        """
        sources, self.copy_sources = self.copy_sources, []
        own = {window.group: window for window in self.windows}
        return [
            (source, own[group].of(index, index + 1)[0] if group else self.ids[index])
            for group, source in sources
        ]

    def all(self) -> Iterator[int]:
        """Yield the blocks of all groups, without sources of copies."""
        return chain(self.ids, *(window.ids for window in self.windows))

    @property
    def count(self) -> int:
        """The number of blocks that are held or reserved."""
        return len(self.ids) + sum(len(one.ids) for one in self.windows) + self.num_reserved

    def release(self) -> None:
        """Hold no block; the hashes stay."""
        self.ids, self.windows, self.end, self.num_registered = [], [], 0, 0
        self.num_reserved, self.unsent, self.copy_sources = 0, [], []
        self.state, self.branch = -1, 0

    def add_hashes(self, hashes: Iterable[bytes]) -> None:
        """Add the hashes of the next full blocks."""
        self.hashes += hashes

    def copy_hashes(self, other: HeldBlocks, most: int | None = None) -> None:
        """Take the hashes of another request with the same tokens, of `most` blocks or all."""
        self.hashes = other.hashes[:most]
