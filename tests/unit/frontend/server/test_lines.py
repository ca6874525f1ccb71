"""JSON that every reader takes as one line."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from sidestep.frontend.server.transport.lines import encode_line

LINE_ENDS = st.sampled_from("\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")


@given(st.lists(st.text() | st.text(LINE_ENDS)).map("".join))
def test_a_text_is_one_line_and_the_same_text(text: str) -> None:
    data = encode_line({"text": text, text: [text]})
    assert data.decode().splitlines() == [data.decode()]
    assert msgspec.json.decode(data) == {"text": text, text: [text]}


def test_a_character_that_ends_no_line_is_not_escaped() -> None:
    assert encode_line("Ü€\u2027\u202a") == '"Ü€\u2027\u202a"'.encode()
