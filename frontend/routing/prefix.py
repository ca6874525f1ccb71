"""The replica for which a request is least work, weighed against how much each has already."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from hashlib import blake2b

from sidestep.frontend.routing.router import SEQUENCE_TOKENS, RoutedRequest, Router
from sidestep.frontend.routing.seen_blocks import SeenBlocks, block_hashes

_DEARER = 0.5
"""A replica with so much more than its share, as a part of that, counts as e times as dear."""
_FEW_TOKENS = 8192
"""Differences of work that are small beside this do not matter, since a step takes so much at
once."""
_FEW_OF_CACHE = 1 / 16
"""Nor do those of what has been sent over time that are small beside this share of a replica's
cache."""
_HOME = 0.5
"""How much a prompt that nobody knows prefers the replica that its hash names."""


class PrefixRouter(Router):
    """Affinity to prefixes, bounded by load.

    The cost of a replica is what it would have to compute, times exp(its excess / 50%). The excess
    is of two things over the replicas' mean: of the work in flight, and of the work sent to it
    while its cache was last filled once, which is what presses older prefixes out of it. So a new
    conversation goes where there is least to do, and one that goes on stays where it is known until
    others have much less to do: the more of it is known, the longer.

    Of replicas that know equally much of a prompt one is preferred: the one that the first block
    after that names (rendezvous hashing, Thaler and Ravishankar 1998). So frontends that do not
    know of each other tend to send a conversation's turns to the same replica.
    """

    def __init__(self, num_blocks: Mapping[int, int], block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._block_size = block_size
        self._seen = {replica: SeenBlocks(count) for replica, count in num_blocks.items()}
        self._cache_tokens = block_size * min(num_blocks.values())
        self._sent = dict.fromkeys(num_blocks, 0.0)

    def dead(self, replica: int) -> None:
        super().dead(replica)
        del self._seen[replica], self._sent[replica]

    def _pick(self, request: RoutedRequest) -> tuple[int, int]:
        size = self._block_size
        hashes = block_hashes(
            request.token_ids, size, request.cache_salt, request.num_public_tokens
        )
        loads = self.candidates
        known = {replica: self._seen[replica].match(hashes) for replica in loads}
        home = self._home(request, known)
        in_flight = _excess(loads, _FEW_TOKENS)
        sent = _excess(
            {replica: self._sent[replica] for replica in loads},
            max(_FEW_TOKENS, _FEW_OF_CACHE * self._cache_tokens),
        )
        least, chosen, work = math.inf, -1, 0
        for replica, num_known in known.items():
            to_do = request.num_tokens - num_known * size + SEQUENCE_TOKENS * request.num_sequences
            cost = (
                math.log(to_do)
                + (in_flight[replica] + sent[replica]) / _DEARER
                - _HOME * (replica == home)
            )
            if cost < least:
                least, chosen, work = cost, replica, to_do
        self._seen[chosen].add(hashes)
        self._note(chosen, work)
        return chosen, known[chosen] * size

    def _home(self, request: RoutedRequest, known: Mapping[int, int]) -> int | None:
        """Where it belongs, if several know equally much of it."""
        most, width = max(known.values()), self._block_size * 4
        equals = [replica for replica, num_known in known.items() if num_known == most]
        block = request.token_ids[most * width : (most + 1) * width]
        return rendezvous(block, equals) if len(equals) > 1 and len(block) == width else None

    def _note(self, replica: int, work: int) -> None:
        """Forgets, with each piece of work, as much of what was sent before."""
        keep = math.exp(-work / (self._cache_tokens * len(self._sent)))
        for each in self._sent:
            self._sent[each] *= keep
        self._sent[replica] += work


def _excess(amounts: Mapping[int, float], little: float) -> dict[int, float]:
    """How much more or less than its share each has, as a share of that."""
    mean = sum(amounts.values()) / len(amounts)
    return {replica: (amount - mean) / (mean + little) for replica, amount in amounts.items()}


def rendezvous(key: bytes, replicas: Iterable[int]) -> int:
    """The one of them that a key belongs to, in every process; a replica's end moves no other's
    keys.
    """
    return max(
        replicas, key=lambda r: blake2b(key, digest_size=8, salt=r.to_bytes(4, "little")).digest()
    )
