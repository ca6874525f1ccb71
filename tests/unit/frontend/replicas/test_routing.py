"""Routers: the rules that all of them keep, and the default one's treatment of conversations."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidestep.frontend.routing.prefix import PrefixRouter
from sidestep.frontend.routing.router import RoutedRequest, Router
from sidestep.frontend.routing.seen_blocks import SeenBlocks, block_hashes
from sidestep.ipc.common import registry
from sidestep.ipc.transport.messages import pack_ids

BLOCK = 16
Make = Callable[[int], Router]


def routed(handle: int, tokens: list[int], **more: Any) -> RoutedRequest:
    return RoutedRequest(handle, pack_ids(tokens), **more)


@pytest.fixture(params=sorted(registry.ROUTERS))
def make(request: pytest.FixtureRequest) -> Make:
    """Return a function that makes any router, for `n` replicas."""

    def make_router(count: int) -> Router:
        router: Router = registry.load(registry.ROUTERS[request.param])(
            dict.fromkeys(range(count), 500), BLOCK
        )
        return router

    return make_router


def test_each_router_keeps_its_books_and_its_replicas_even(make: Make) -> None:
    """Test the conformance of a router to any order of requests, ends, deaths and returns."""
    rng = random.Random(7)
    for trial in range(20):
        router, alive, dead = make(4), [0, 1, 2, 3], list[int]()
        num_deaths = 0
        live: dict[int, int] = {}
        taken: Counter[int] = Counter()
        for handle in range(400):
            prompt = [rng.randrange(9) for _ in range(rng.randrange(1, 60))]
            replica = router.choose(
                routed(
                    handle,
                    prompt,
                    num_sequences=rng.choice((1, 1, 4)),
                    cache_salt=rng.choice((None, "a")),
                    num_public_tokens=rng.randrange(40),
                )
            )
            assert replica in alive
            live[handle] = replica
            taken[replica] += 1
            while len(live) > 20 or (live and rng.random() < 0.3):
                ended = rng.choice(list(live))
                router.finished(ended)
                del live[ended]
            if len(alive) > 1 and rng.random() < 0.005:
                gone = alive.pop(rng.randrange(len(alive)))
                router.dead(gone)
                dead.append(gone)
                num_deaths += 1
                # The dead replica's requests go elsewhere, under the same handles.
                for lost in [h for h, r in live.items() if r == gone]:
                    live[lost] = router.choose(routed(lost, [1, 2, 3]))
                    assert live[lost] in alive
            elif dead and rng.random() < 0.02:
                alive.append(dead.pop())
                router.back(alive[-1], 400)
            assert set(router.loads) == set(alive)
            assert all((load > 0) == (r in live.values()) for r, load in router.loads.items())
        if not num_deaths:
            assert max(taken.values()) < 1.5 * 400 / 4, f"trial {trial}: {taken}"
        for handle in list(live):
            router.finished(handle)
        assert set(router.loads.values()) == {0}


def test_each_router_uses_a_replica_that_is_back(make: Make) -> None:
    router = make(2)
    for handle in range(20):
        router.choose(routed(handle, [handle] * 40))
    router.dead(1)
    router.back(1, 500)
    assert router.loads[1] == 0
    taken = [router.choose(routed(100 + i, [100 + i] * 40)) for i in range(6)]
    assert 1 in taken
    router.dead(0)
    router.dead(1)
    router.back(0, 500)
    assert router.choose(routed(200, [1] * 40)) == 0


def test_each_router_passes_over_suspended_replicas_while_another_is_there(make: Make) -> None:
    router, handles = make(3), itertools.count()

    def taken() -> set[int]:
        found = {
            handle: router.choose(routed(handle, [handle] * 40))
            for handle in itertools.islice(handles, 30)
        }
        for handle, replica in found.items():
            if replica in router.loads:
                router.finished(handle)
        return set(found.values())

    router.suspend(1)
    assert taken() == {0, 2}
    router.dead(0)
    assert taken() == {2}
    router.suspend(2)
    assert taken() == {1, 2}, "all that live are suspended: any of them"
    router.resume(1)
    router.resume(1)
    assert taken() == {1}
    router.resume(2)
    assert taken() == {1, 2}


def test_each_router_makes_the_same_choices_of_the_same_requests(make: Make) -> None:
    def choices() -> list[int]:
        router, rng = make(3), random.Random(1)
        return [
            router.choose(routed(h, [rng.randrange(5) for _ in range(rng.randrange(1, 99))]))
            for h in range(99)
        ]

    assert choices() == choices()


# The blocks that a replica has seen.


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=30), st.integers(1, 12)
)
def test_what_is_known_of_a_prompt_is_its_beginning(
    prompts: list[list[int]], capacity: int
) -> None:
    seen = SeenBlocks(capacity)
    for prompt in prompts:
        hashes = block_hashes(pack_ids(prompt), 1)
        known = seen.match(hashes)
        assert all(h in seen._blocks for h in hashes[:known]) and not any(
            h in seen._blocks for h in hashes[known:]
        )
        seen.add(hashes)
        assert seen.match(hashes) == min(len(hashes), capacity) and len(seen) <= capacity


def test_the_salt_counts_from_the_first_block_that_is_not_public() -> None:
    tokens = pack_ids(range(64))
    plain, salted, other = (block_hashes(tokens, BLOCK, salt) for salt in (None, "a", "b"))
    assert not set(plain) & set(salted) and not set(salted) & set(other)
    partly = block_hashes(tokens, BLOCK, "a", 2 * BLOCK + 5)
    assert partly[:2] == plain[:2] and not set(partly[2:]) & {*plain, *salted}


# The default.


def test_a_conversation_stays_where_it_is_known() -> None:
    router, history = PrefixRouter({0: 500, 1: 500}, BLOCK), list(range(100))
    first = router.choose(routed(0, history))
    for turn in range(1, 9):
        history += range(turn, turn + 40)
        assert router.choose(routed(turn, history)) == first
        router.finished(turn)


def test_another_salt_is_another_conversation() -> None:
    """One tenant's cached blocks attract no other's requests: they could not use them."""
    router, prompt = PrefixRouter({0: 500, 1: 500}, BLOCK), list(range(2000))
    first = router.choose(routed(0, prompt, cache_salt="a"))
    assert router.choose(routed(1, prompt, cache_salt="b")) != first
    assert router.choose(routed(2, prompt, cache_salt="a")) == first


def test_a_prefix_that_all_share_does_not_keep_all_at_one_replica() -> None:
    router, system, rng = (
        PrefixRouter(dict.fromkeys(range(3), 5000), BLOCK),
        list(range(640)),
        random.Random(3),
    )
    taken = Counter(
        router.choose(routed(h, system + [rng.randrange(999) for _ in range(50)]))
        for h in range(300)
    )
    assert max(taken.values()) <= 1.2 * 100


@pytest.mark.parametrize(("num_frontends", "share"), [(1, 0.97), (3, 0.85)])
@pytest.mark.parametrize("num_replicas", [2, 4])
def test_conversations_are_cached_as_in_one_large_replica(
    num_replicas: int, num_frontends: int, share: float
) -> None:
    """Simulate 80 conversations of 10 turns, 32 requests at a time, without an engine.

    With several frontends each turn comes to any of them, and they do not know of each other.
    """
    rng = random.Random(num_replicas)
    tokens = [rng.randrange(500) for _ in range(64)]
    history = {
        s: tokens + [rng.randrange(500) for _ in range(rng.randint(20, 200))] for s in range(80)
    }
    routers = [
        PrefixRouter(dict.fromkeys(range(num_replicas), 4000), BLOCK) for _ in range(num_frontends)
    ]
    caches, large = [SeenBlocks(4000) for _ in range(num_replicas)], SeenBlocks(4000 * num_replicas)
    hits = hits_of_large = 0
    work = [0] * num_replicas
    waiting, running = deque([*range(80)] * 10), list[tuple[int, Router]]()
    for handle, session in enumerate(waiting):
        ids, router = np.array(history[session], np.int32).tobytes(), rng.choice(routers)
        replica, hashes = router.choose(RoutedRequest(handle, ids)), block_hashes(ids, BLOCK)
        hits += caches[replica].match(hashes)
        hits_of_large += large.match(hashes)
        work[replica] += len(hashes) - caches[replica].match(hashes)
        caches[replica].add(hashes)
        large.add(hashes)
        history[session] += [rng.randrange(500) for _ in range(rng.randint(30, 150))]
        running.append((handle, router))
        if len(running) >= 32:
            ended, at = running.pop(rng.randrange(32))
            at.finished(ended)
    assert hits >= share * hits_of_large
    assert max(work) <= 1.2 * sum(work) / num_replicas


def test_processes_agree_on_where_an_unknown_conversation_belongs() -> None:
    program = (
        "from sidestep.frontend.routing.prefix import rendezvous;"
        "print([rendezvous(bytes([i]) * 64, range(5)) for i in range(99)])"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1 and set(said.pop()) >= set("01234")
