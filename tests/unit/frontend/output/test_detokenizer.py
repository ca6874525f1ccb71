"""Text as it streams: whole characters only, nothing taken back.

Stop strings are found wherever tokens break.
"""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from sidestep import DEFAULT_MODEL
from sidestep.frontend.input.tokenizer import Tokenizer
from sidestep.frontend.output.detokenizer import Detokenizer

TOKENIZER = Tokenizer(DEFAULT_MODEL)
TEXTS = st.text(
    st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40
) | st.sampled_from(
    [
        "def get_name(self):\n    return self.name\n",
        "naïve 🦆🏳️‍🌈 日本語",
        "a\r\n\tb",
    ]
)


def stream(detokenizer: Detokenizer, tokens: list[int]) -> tuple[list[str], str | None]:
    """Return the text after each token and at the end, and the stop string."""
    seen = []
    for token in tokens:
        stop = detokenizer.add(token)
        seen.append(detokenizer.text)
        if stop is not None:
            return seen, stop
    stop = detokenizer.finish()
    return [*seen, detokenizer.text], stop


@settings(max_examples=200, deadline=None)
@given(TEXTS, TEXTS)
def test_an_encoded_text_comes_out_whole_and_only_grows(prompt: str, text: str) -> None:
    tokens = TOKENIZER.encode(text)
    seen, _ = stream(Detokenizer(TOKENIZER, TOKENIZER.encode(prompt)), tokens)
    assert seen[-1] == TOKENIZER.decode(tokens)
    for before, after in zip(seen, seen[1:], strict=False):
        assert after.startswith(before)
    assert not any("�" in s for s in seen) or "�" in text


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(3, TOKENIZER.vocab_size - 1), min_size=1, max_size=30))
@example([TOKENIZER.fast.token_to_id("ð")])
def test_any_tokens_stream_to_what_a_full_decode_gives(tokens: list[int]) -> None:
    seen, _ = stream(Detokenizer(TOKENIZER, [5, 6, 7]), tokens)
    assert seen[-1] == TOKENIZER.decode([5, 6, 7, *tokens])[len(TOKENIZER.decode([5, 6, 7])) :]
    for before, after in zip(seen, seen[1:], strict=False):
        assert after.startswith(before)


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.data(), st.booleans())
def test_a_stop_string_is_found_wherever_tokens_break_and_never_shown_before(
    text: str, data: st.DataObject, include: bool
) -> None:
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start : start + data.draw(st.integers(1, 6))]
    detokenizer = Detokenizer(TOKENIZER, [5], stop=[stop], include_stop=include)
    seen, found = stream(detokenizer, TOKENIZER.encode(text))
    end = text.index(stop)
    assert found == stop
    assert seen[-1] == text[: end + len(stop) if include else end]
    for shown in seen:
        assert seen[-1].startswith(shown)


def test_the_stop_string_that_ends_first_wins() -> None:
    detokenizer = Detokenizer(TOKENIZER, [5], stop=["name", "get_n"])
    assert stream(detokenizer, TOKENIZER.encode("def get_name("))[1] == "get_n"
    assert detokenizer.text == "def "


def test_text_held_back_for_a_stop_string_that_does_not_come_is_given_at_the_end() -> None:
    seen, found = stream(Detokenizer(TOKENIZER, [5], stop=["abcX"]), TOKENIZER.encode("zabc"))
    assert found is None and seen[-1] == "zabc"
    assert all(not s.endswith("abc") for s in seen[:-1])


def test_special_tokens_are_left_out_unless_wanted() -> None:
    tokens = TOKENIZER.encode("a<|im_end|>b")
    assert stream(Detokenizer(TOKENIZER, [5]), tokens)[0][-1] == "ab"
    assert (
        stream(Detokenizer(TOKENIZER, [5], skip_special_tokens=False), tokens)[0][-1]
        == "a<|im_end|>b"
    )
