"""Windows count each token of a text once, with context before it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidestep import ValidationError
from sidestep.frontend.evaluation.windows import Window, check_sizes, make_windows


@given(
    num_tokens=st.integers(0, 400),
    context=st.integers(2, 60),
    num_before=st.integers(0, 2),
    data=st.data(),
)
def test_each_token_is_counted_once(
    num_tokens: int, context: int, num_before: int, data: st.DataObject
) -> None:
    most = context - max(1, num_before)
    if most < 1:
        return
    room, stride = check_sizes(context, data.draw(st.integers(1, most)), num_before)
    windows = list(make_windows(num_tokens, room, stride, num_before))
    counted = [place for window in windows for place in range(window.first, window.end)]
    assert counted == list(range(0 if num_before else 1, num_tokens))
    for window in windows:
        assert 0 <= window.begin <= window.first < window.end
        assert window.end - window.begin + num_before <= context
        assert num_before or window.begin < window.first, "a token follows nothing"
        assert window is windows[0] or window.num_counted <= stride


def test_windows_by_hand() -> None:
    assert list(make_windows(10, 4, 2, 0)) == [
        Window(0, 1, 4),
        Window(2, 4, 6),
        Window(4, 6, 8),
        Window(6, 8, 10),
    ]
    assert list(make_windows(6, 4, 4, 1)) == [Window(0, 0, 4), Window(2, 4, 6)]


def test_the_stride_is_half_of_the_context_unless_it_is_given() -> None:
    assert check_sizes(1024, None, 0) == (1024, 512)
    assert check_sizes(2, None, 1) == (1, 1)


@pytest.mark.parametrize(
    ("context", "stride", "before", "field"),
    [(8, 8, 0, "stride"), (8, 8, 1, "stride"), (2, None, 2, "context")],
)
def test_sizes_that_leave_tokens_without_context_are_refused(
    context: int, stride: int | None, before: int, field: str
) -> None:
    with pytest.raises(ValidationError, match=f"^{field}: "):
        check_sizes(context, stride, before)
