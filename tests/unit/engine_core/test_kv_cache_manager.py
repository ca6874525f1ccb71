"""The KV cache manager.

Requests get all their blocks or none, and only equal prefixes share blocks.
"""

from array import array

import pytest

from sidestep.engine_core.kv_cache.kv_cache_manager import KVCacheManager
from sidestep.engine_core.requests.request import Request
from tests.fakes import make_request


def request(prompt: list[int], salt: str | None = None, num_public: int = 0) -> Request:
    return Request.from_message(
        make_request(prompt, 50, cache_salt=salt, num_public_tokens=num_public), 1000, frozenset()
    )


def run(
    kv: KVCacheManager, prompt: list[int], salt: str | None = None, num_public: int = 0
) -> Request:
    """Return a request whose prompt has been computed."""
    entered = request(prompt, salt, num_public)
    assert kv.enter(entered)
    entered.continue_at(len(prompt))
    kv.remember(entered)
    return entered


def hits(
    kv: KVCacheManager, prompt: list[int], salt: str | None = None, num_public: int = 0
) -> int:
    """Return the number of cached tokens that a new request finds."""
    probe = request(prompt, salt, num_public)
    assert kv.enter(probe)
    kv.free(probe)
    return probe.num_computed


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], 8),
        ([1, 2, 3, 4, 5, 6, 7, 8], 4),  # the last token must be computed, and with it its block
        ([1, 2, 3, 4, 9, 9, 9, 9, 9], 4),
        (
            [9, 2, 3, 4, 5, 6, 7, 8, 9],
            0,
        ),  # equal second blocks after different first ones are not equal
        ([5, 6, 7, 8, 1], 0),
        ([1, 2, 3], 0),
    ],
)
def test_only_equal_prefixes_of_full_blocks_are_found(prompt: list[int], found: int) -> None:
    kv = KVCacheManager(16, 4)
    run(kv, [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9])
    assert hits(kv, prompt) == found


def test_a_salt_is_part_of_every_block() -> None:
    kv = KVCacheManager(16, 4)
    run(kv, [1] * 9, salt="mine")
    assert [hits(kv, [1] * 9, salt) for salt in ("mine", "yours", "", None)] == [8, 0, 0, 0]


@pytest.mark.parametrize(
    ("num_public", "shared"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (11, 8)]
)
def test_public_tokens_are_shared_by_full_blocks_and_nothing_beyond_them(
    num_public: int, shared: int
) -> None:
    kv = KVCacheManager(32, 4)
    prompt = list(range(1, 18))
    run(kv, prompt, "mine", num_public)
    assert hits(kv, prompt, "yours", num_public) == shared
    assert hits(kv, prompt, None) == shared
    assert hits(kv, prompt, "mine", num_public) == 16
    # A request that declares fewer public tokens finds no more than those, not even of its own
    # tenant's.
    assert hits(kv, prompt, "mine", 0) == (16 if shared == 0 else 0)


def test_a_salt_that_spells_a_block_finds_nothing_of_it() -> None:
    kv = KVCacheManager(16, 4)
    run(kv, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    spelled = array("i", [1, 2, 3, 4]).tobytes().decode()
    assert hits(kv, [5, 6, 7, 8, 9], spelled) == 0


def test_a_block_is_not_found_before_it_is_computed_and_its_tokens_are_known() -> None:
    kv = KVCacheManager(16, 4)
    entered = request([1] * 9)
    assert kv.enter(entered) and hits(kv, [1] * 9) == 0
    entered.continue_at(4)
    kv.remember(entered)
    assert hits(kv, [1] * 9) == 4
    entered.continue_at(12)  # the tokens after the ninth are still in flight
    kv.remember(entered)
    assert hits(kv, [1] * 13) == 8
    entered.token_ids += [1, 1, 1]
    kv.remember(entered)
    assert hits(kv, [1] * 13) == 12


def test_entering_is_all_or_nothing() -> None:
    kv = KVCacheManager(4, 4)
    first = run(kv, [1] * 5)
    late = request([2] * 9)
    before = repr(kv)
    assert not kv.enter(late)
    assert repr(kv) == before and late.blocks.ids == []
    kv.free(first)
    assert kv.enter(late) and len(late.blocks.ids) == 3


def test_a_hit_on_a_free_block_is_not_counted_as_room_for_new_ones() -> None:
    kv = KVCacheManager(3, 4)
    kv.free(run(kv, [1] * 9))
    assert not kv.enter(request([1] * 13)), "two hits and two new blocks do not fit in three"
    assert kv.enter(request([1] * 12))
    assert kv.pool.num_free == 0


def test_growing_is_all_or_nothing() -> None:
    kv = KVCacheManager(3, 4)
    entered = run(kv, [1] * 4)
    assert kv.grow(entered, 4) == []
    assert kv.grow(entered, 13) is None and len(entered.blocks.ids) == 1
    blocks = kv.grow(entered, 12)
    assert blocks is not None and len(blocks) == 2 and entered.blocks.ids[1:] == blocks


def test_the_end_of_a_prompt_is_forgotten_before_its_beginning() -> None:
    kv = KVCacheManager(4, 4)
    old = run(kv, [1] * 16)
    kv.free(old)
    run(kv, [9])
    (_, _, _, last), rest = old.blocks.hashes, old.blocks.hashes[:3]
    assert kv.pool.lookup(last) is None and all(kv.pool.lookup(h) is not None for h in rest)


def test_without_prefix_caching_nothing_is_found_or_counted() -> None:
    kv = KVCacheManager(16, 4, enable_prefix_caching=False)
    run(kv, [1] * 9)
    assert hits(kv, [1] * 9) == 0
    assert kv.num_queried_tokens == kv.pool.num_cached == 0


def test_after_a_reset_neither_old_blocks_nor_what_follows_them_are_found() -> None:
    kv = KVCacheManager(16, 4)
    old = run(kv, [1] * 9)
    kv.reset_prefix_cache([old])
    assert hits(kv, [1] * 9) == 0
    run(kv, [1] * 9)  # the same beginning, computed anew
    old.token_ids += [1] * 4
    old.continue_at(12)
    kv.remember(old)
    assert hits(kv, [1] * 13) == 8, (
        "the third block of the old request depends on what was forgotten"
    )


def test_invariants_notice_a_block_that_nobody_gave_back() -> None:
    kv = KVCacheManager(4, 4)
    run(kv, [1] * 5)
    with pytest.raises(AssertionError, match="not what requests hold"):
        kv.check_invariants([])
