"""The block pool hands blocks out in the order that keeps the most useful content longest."""

import pytest

from sidestep.engine_core.kv_cache.block_pool import BlockPool


def test_content_is_kept_until_the_block_is_handed_out_again() -> None:
    pool = BlockPool(3)
    first, second, _ = pool.allocate(3)
    pool.register(first, b"first")
    pool.register(second, b"second")
    pool.free([first, second])
    assert pool.lookup(b"first") == first
    assert pool.allocate(1) == [first], "the least recently freed goes first"
    assert pool.lookup(b"first") is None
    assert pool.lookup(b"second") == second


def test_blocks_without_content_are_handed_out_before_cached_ones() -> None:
    pool = BlockPool(2)
    cached, plain = pool.allocate(2)
    pool.register(cached, b"content")
    pool.free([cached])
    pool.free([plain])
    assert pool.allocate(1) == [plain]


def test_a_shared_block_is_free_when_the_last_user_lets_go() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.share(block)
    pool.free([block])
    assert pool.num_free == 0
    pool.free([block])
    assert pool.num_free == 1


def test_a_hit_takes_a_free_block_out_of_the_free_list() -> None:
    pool = BlockPool(2)
    block, other = pool.allocate(2)
    pool.register(block, b"content")
    pool.free([block, other])
    pool.share(block)
    assert pool.num_free == 1 and pool.allocate(1) == [other]


def test_the_first_block_with_a_content_stays_the_known_one() -> None:
    pool = BlockPool(2)
    one, two = pool.allocate(2)
    pool.register(one, b"same")
    pool.register(two, b"same")
    assert pool.lookup(b"same") == one and pool.num_cached == 1
    pool.check_invariants()


def test_invariants_notice_a_block_freed_twice() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.free([block, block])
    with pytest.raises(AssertionError, match="freed more often"):
        pool.check_invariants()
