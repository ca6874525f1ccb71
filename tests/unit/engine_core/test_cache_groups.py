"""Cache groups: windows keep no more than they reach, and prefixes are found by their last window.

tests/property/test_scheduler_machine.py runs the scheduler with such groups under random load.
"""

from __future__ import annotations

import pytest

from sidestep.engine_core.kv_cache.kv_cache_manager import KVCacheManager
from sidestep.engine_core.requests.request import Request
from sidestep.executor.runner.fake import expected_tokens
from sidestep.ipc.model.cache_groups import (
    CacheGroups,
    cache_groups,
    layer_places,
    layers_in_block,
)
from sidestep.ipc.model.layer_spec import LayerSpec
from tests.fakes import VOCAB_SIZE, Engine, make_request, make_scheduler, make_spec

WINDOW, BLOCK, CHUNK = 8, 4, 8
WINDOWS_ALONE = CacheGroups(windows=(WINDOW,), has_full=False)
BOTH = CacheGroups(windows=(WINDOW,))


def request(prompt: list[int]) -> Request:
    return Request.from_message(make_request(prompt, 50), 1000, frozenset())


def compute(kv: KVCacheManager, prompt: list[int]) -> Request:
    """Return a request whose prompt has been computed in chunks."""
    entered = request(prompt)
    assert kv.enter(entered)
    while (first := entered.num_computed) < len(prompt):
        count = min(CHUNK, len(prompt) - first)
        assert kv.grow(entered, first + count) == []
        entered.plan_row(count, 0)
        kv.remember(entered)
    return entered


def forget(kv: KVCacheManager, of: Request, *indices: int) -> None:
    """Let the pool forget blocks of the group with a window."""
    for index in indices:
        kv.pool._forget(kv.pool._by_hash[of.blocks.hashes[index] + bytes([1])])


def hits(kv: KVCacheManager, prompt: list[int]) -> int:
    """Return the number of cached tokens that a new request finds."""
    probe = request(prompt)
    assert kv.enter(probe)
    kv.free(probe)
    return probe.num_computed


def layers(windows: list[int]) -> tuple[LayerSpec, ...]:
    return tuple(make_spec(mixer={"window": window}).layers[0] for window in windows)


@pytest.mark.parametrize(
    ("windows", "expected", "in_block"),
    [
        ([0] * 28, CacheGroups(), 28),
        ([4096] * 32, CacheGroups(windows=(4096,), has_full=False), 32),
        ([1 << 17] * 32, CacheGroups(), 32),  # no request is that long
        ([128, 0] * 12, CacheGroups(windows=(128,)), 12),  # gpt-oss-20b
        (([4096] * 3 + [0]) * 8, CacheGroups(windows=(4096,) * 3), 8),  # OLMo 3 7B
        (([512] * 5 + [0]) * 4 + [512] * 2, CacheGroups(windows=(512,) * 6), 4),  # Gemma 3 1B
        ([8, 16] * 3, CacheGroups(windows=(8, 16), has_full=False), 3),
        ([0] * 20 + [64] * 8, CacheGroups(windows=(64,)), 20),
    ],
    ids=lambda value: "" if isinstance(value, list) else str(value),
)
def test_layers_share_blocks_without_wasting_memory(
    windows: list[int], expected: CacheGroups, in_block: int
) -> None:
    specs = layers(windows)
    groups = cache_groups(specs, 1 << 16)
    assert groups == expected
    places = layer_places(specs, groups, 1 << 16)
    assert len(set(places)) == len(places), "two layers share memory"
    assert layers_in_block(places) == in_block
    kept = (0, *groups.windows)
    assert [kept[place.group] for place in places] == [w if w < 1 << 16 else 0 for w in windows]


def test_a_prompt_of_ten_windows_keeps_the_blocks_of_one() -> None:
    kv = KVCacheManager(64, BLOCK, groups=WINDOWS_ALONE, max_ahead=CHUNK)
    long = compute(kv, list(range(10 * WINDOW)))
    assert kv.grow(long, 10 * WINDOW + 1) == []
    held = list(long.blocks.all())
    assert len(held) == WINDOW // BLOCK + 1, "the window, and the block of the next token"
    assert kv.pool.num_used == len(held)
    kv.check_invariants([long])
    kv.free(long)
    assert kv.pool.num_used == 0


def test_full_attention_beside_a_window_keeps_all_tokens() -> None:
    kv = KVCacheManager(64, BLOCK, groups=BOTH, max_ahead=CHUNK)
    long = compute(kv, list(range(80)))
    assert kv.grow(long, 81) is not None
    assert len(long.blocks.ids) == 21
    assert len(list(long.blocks.all())) == 21 + 3


@pytest.mark.parametrize("groups", [WINDOWS_ALONE, BOTH], ids=str)
def test_a_prefix_is_found_while_its_last_window_is_cached(groups: CacheGroups) -> None:
    kv = KVCacheManager(64, BLOCK, groups=groups, max_ahead=CHUNK)
    prompt = list(range(80))
    first = compute(kv, prompt)
    kv.free(first)
    assert hits(kv, [*prompt, 1]) == 80
    forget(kv, first, *range(18))
    assert hits(kv, [*prompt, 1]) == 80, "the last window is enough"
    assert hits(kv, [*prompt[:40], 99, 99]) == 0, "the window at this place is not there"
    forget(kv, first, 18)
    assert hits(kv, [*prompt, 1]) == 0


@pytest.mark.parametrize("groups", [WINDOWS_ALONE, BOTH, CacheGroups(windows=(3, 8))], ids=str)
@pytest.mark.parametrize("n", [1, 3])
def test_a_long_prompt_gives_the_same_tokens_in_a_small_cache(groups: CacheGroups, n: int) -> None:
    prompt = [1 + i % 40 for i in range(100)]
    count = 45 + 40 * groups.has_full
    engine = Engine(make_scheduler(num_blocks=count, budget=16, groups=groups))
    engine.scheduler.add(make_request(prompt, 20, n=n))
    engine.run()
    for index in range(n):
        seed = make_request(prompt, n=n).sampling.for_choice(index).seed or 0
        assert engine.tokens[index] == expected_tokens(prompt, 20, seed, VOCAB_SIZE)
    assert engine.scheduler.kv.pool.num_used == 0


def test_a_window_alone_has_room_for_requests_longer_than_the_cache() -> None:
    scheduler = make_scheduler(num_blocks=30, budget=16, groups=WINDOWS_ALONE)
    engine, prompt = Engine(scheduler), [1 + i % 40 for i in range(1000)]
    assert scheduler.kv.longest > 1000 > 30 * BLOCK
    scheduler.add(make_request(prompt, 30))
    engine.run()
    assert engine.tokens[0] == expected_tokens(prompt, 30, 0, VOCAB_SIZE)


def test_two_long_prompts_do_not_take_turns_at_preempting_each_other() -> None:
    scheduler = make_scheduler(num_blocks=26, budget=16, groups=WINDOWS_ALONE, prefix_caching=False)
    engine = Engine(scheduler)
    for handle in range(6):
        scheduler.add(make_request([1 + handle] * 400, 4, handle=handle))
    engine.run()
    assert scheduler.stats()["num_preemptions"] == 0
