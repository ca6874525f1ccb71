"""The router that weighs a request's work on each replica against the replica's load."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from hashlib import blake2b

from sidestep.frontend.routing.router import SEQUENCE_TOKENS, RoutedRequest, Router
from sidestep.frontend.routing.seen_blocks import SeenBlocks, block_hashes

_DEARER = 0.5
"""Excess of a replica over its share, as a part of the share, that multiplies its cost by e."""
_FEW_TOKENS = 8192
"""Tokens of work beside which smaller differences of load do not matter.

One step computes about this many tokens at once.
"""
_FEW_OF_CACHE = 1 / 16
"""Share of a replica's cache beside which smaller differences of the work sent do not matter."""
_HOME = 0.5
"""Amount by which the logarithm of the home replica's cost is lowered.

The home is the replica that the hash of a prompt's first unknown block names.
"""


class PrefixRouter(Router):
    """A router with affinity to prefixes, bounded by load.

    The cost of a replica is the work that it would have to compute, times exp(its excess / 50%).
    The excess is the sum of two excesses over the replicas' mean. One is that of the work in
    flight. The other is that of the work sent to the replica while its cache was last filled once:
    this work evicts older prefixes. So a new conversation goes to the replica with the least work.
    A conversation that continues stays on the replica that knows it until other replicas have much
    less work. The more of it the replica knows, the longer it stays.

    If several replicas know equally much of a prompt, the router prefers one of them by rendezvous
    hashing (Thaler and Ravishankar 1998). The key is the first block after the known part. So
    frontends that do not know of each other tend to send a conversation's turns to the same
    replica.
    """

    def __init__(self, num_blocks: Mapping[int, int], block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._block_size = block_size
        self._seen = {replica: SeenBlocks(count) for replica, count in num_blocks.items()}
        self._cache_tokens = block_size * min(num_blocks.values())
        self._sent = dict.fromkeys(num_blocks, 0.0)

    def dead(self, replica: int) -> None:
        """Forget a replica that has died, with its blocks and the work sent to it."""
        super().dead(replica)
        del self._seen[replica], self._sent[replica]

    def back(self, replica: int, num_blocks: int) -> None:
        """Add a replica that has been started again, and knows no block."""
        super().back(replica, num_blocks)
        self._seen[replica] = SeenBlocks(num_blocks)
        self._sent[replica] = 0.0

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
        """Return a prompt's home among the replicas that know most of it, if there are several."""
        most, width = max(known.values()), self._block_size * 4
        equals = [replica for replica, num_known in known.items() if num_known == most]
        block = request.token_ids[most * width : (most + 1) * width]
        return rendezvous(block, equals) if len(equals) > 1 and len(block) == width else None

    def _note(self, replica: int, work: int) -> None:
        """Note work that was sent to a replica.

        Each piece of work decays what was sent before, in the steady state by as much as it adds.
        """
        keep = math.exp(-work / (self._cache_tokens * len(self._sent)))
        for each in self._sent:
            self._sent[each] *= keep
        self._sent[replica] += work


def _excess(amounts: Mapping[int, float], little: float) -> dict[int, float]:
    """Return each replica's difference from the mean amount, as a share of the mean."""
    mean = sum(amounts.values()) / len(amounts)
    return {replica: (amount - mean) / (mean + little) for replica, amount in amounts.items()}


def rendezvous(key: bytes, replicas: Iterable[int]) -> int:
    """Return the replica that a key belongs to, the same one in every process.

    When a replica ends, only its own keys move to other replicas.
    """
    return max(
        replicas, key=lambda r: blake2b(key, digest_size=8, salt=r.to_bytes(4, "little")).digest()
    )
