"""The choice of steps that have a graph: by sizes alone, without a GPU."""

from __future__ import annotations

import pytest

from sidestep.executor.gpu.cuda_graphs import StepSizes, mixed_ladder


def find(ladder: list[StepSizes], rows: int, tokens: int) -> tuple[int, int] | None:
    return next(((s.rows, s.tokens) for s in ladder if s.takes(rows, tokens)), None)


@pytest.mark.parametrize(
    ("worthwhile", "largest"),
    [(100, None), (1028, 1024), (5000, 2048), (8192, 8192), (14000, 8192)],
)
def test_the_ladder_ends_where_graphs_no_longer_pay(worthwhile: int, largest: int | None) -> None:
    ladder = mixed_ladder(512, 8192, worthwhile)
    assert max((sizes.tokens for sizes in ladder), default=None) == largest
    assert {sizes.rows for sizes in ladder} <= {128, 512}


def test_a_step_takes_the_smallest_graph_that_it_does_not_drown_in() -> None:
    ladder = mixed_ladder(512, 8192, 20_000)
    assert find(ladder, 3, 100) == (128, 128)
    assert find(ladder, 3, 129) == (128, 256)
    assert find(ladder, 200, 1100) == (512, 1280)
    assert find(ladder, 1, 2048) == (128, 2048)
    assert find(ladder, 1, 2049) is None, "three quarters of the largest graph would be padding"
    assert find(ladder, 1, 8192) == (128, 8192)
    assert find(ladder, 300, 7300) == (512, 8192)
    assert find(ladder, 300, 7200) is None
    assert find(ladder, 513, 8192) is None


def test_a_small_budget_has_graphs_up_to_itself() -> None:
    assert [s.tokens for s in mixed_ladder(64, 600, 20_000)] == [128, 256, 384, 512, 600]
