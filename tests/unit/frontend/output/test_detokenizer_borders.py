"""The borders of a text.

The tests cover prompts that end inside a character, stray bytes, and byte-fallback vocabularies.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers

from sidestep import DEFAULT_MODEL
from sidestep.frontend.input.tokenizer import Tokenizer
from sidestep.frontend.output.detokenizer import Detokenizer

BYTES = Tokenizer(DEFAULT_MODEL)
HALVES = [token for token in range(BYTES.vocab_size) if "�" in BYTES.decode([token])]
TEXTS = st.text(st.sampled_from("a€🦆�日x "), max_size=8)
TOKENS = st.lists(
    st.sampled_from(HALVES) | st.integers(0, BYTES.vocab_size - 1), max_size=70
) | TEXTS.map(BYTES.encode)


def run(detokenizer: Detokenizer, tokens: list[int]) -> str:
    """Return the whole text, and check that no shown text changes on the way."""
    for token in tokens:
        before = detokenizer.text
        detokenizer.add(token)
        assert detokenizer.text.startswith(before)
    before = detokenizer.text
    detokenizer.finish()
    assert detokenizer.text.startswith(before)
    return detokenizer.text


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.integers(0, 5), TOKENS)
def test_a_prompt_may_end_anywhere_and_none_of_it_is_shown(
    prompt: str, cut: int, tokens: list[int]
) -> None:
    ids = BYTES.encode("x" + prompt)
    ids = ids[: max(1, len(ids) - cut)]
    text = run(Detokenizer(BYTES, ids), tokens)
    whole, shown = BYTES.decode(ids + tokens, True), BYTES.decode(ids, True)
    assert whole.endswith(text)
    if not shown.endswith("�"):
        assert whole == shown + text


def test_a_character_begun_by_the_prompt_is_completed_by_the_output() -> None:
    duck = BYTES.encode("🦆")
    assert len(duck) > 1
    assert (
        run(Detokenizer(BYTES, [*BYTES.encode("a"), *duck[:1]]), [*duck[1:], *BYTES.encode("b")])
        == "🦆b"
    )


@pytest.mark.parametrize(
    "token", [0, HALVES[0], BYTES.vocab_size + 5], ids=["special", "stray byte", "unknown"]
)
def test_long_runs_without_text_cost_the_same_per_token(token: int) -> None:
    """The library decodes all waiting tokens again with each token.

    Without a limit, a run without text would cost more and more.
    """

    def seconds(count: int) -> float:
        detokenizer = Detokenizer(BYTES, [5])
        start = time.thread_time()
        for _ in range(count):
            detokenizer.add(token)
        return time.thread_time() - start

    few = min(seconds(500) for _ in range(3))
    assert seconds(10_000) < 20 * few * 5


def test_stray_bytes_are_given_out_before_the_end_and_a_character_after_them_is_whole() -> None:
    stray = BYTES.fast.token_to_id("¿") or 0  # the byte 0xBF, which begins no character
    detokenizer = Detokenizer(BYTES, [5])
    for token in [stray] * 60 + BYTES.encode("🦆")[:-1]:
        detokenizer.add(token)
    assert set(detokenizer.text) == {"�"}
    detokenizer.add(BYTES.encode("🦆")[-1])
    assert detokenizer.text == "�" * 60 + "🦆"


# Vocabularies like Llama 2's: words with a leading ▁, bytes where there is no word.
WORDS = ["▁", "a", "b", "c", "▁a", "▁ab", "d", "€", "▁the", "é"]


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    names = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *WORDS]
    fast = FastTokenizer(
        models.BPE(
            vocab={n: i for i, n in enumerate(names)},
            merges=[("▁", "a")],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    fast.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    fast.add_special_tokens(["<s>", "</s>"])
    folder = tmp_path_factory.mktemp("fallback")
    fast.save(str(folder / "tokenizer.json"))
    return Tokenizer(str(folder))


def test_byte_fallback_vocabularies_stream_what_a_full_decode_gives(fallback: Tokenizer) -> None:
    rng = random.Random(0)
    first_word = 3 + 256

    def draw(count: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < count:
            tokens += rng.choice(
                [
                    [rng.randrange(first_word, fallback.vocab_size)],
                    [2],
                    fallback.encode(rng.choice("🦆日ß"))[1:],
                ]
            )
        return tokens

    for _ in range(1000):
        prompt, tokens = [1, *draw(rng.randrange(1, 6))], draw(rng.randrange(20))
        text = run(Detokenizer(fallback, prompt), tokens)
        assert fallback.decode(prompt + tokens, True) == fallback.decode(prompt, True) + text, (
            prompt,
            tokens,
        )


def test_a_character_that_turns_out_to_be_none_does_not_take_text_back(fallback: Tokenizer) -> None:
    sharp_s, stray, word = fallback.encode("ß")[1:], 3 + 0xFF, 3 + 256 + WORDS.index("a")
    text = run(Detokenizer(fallback, [word]), [*sharp_s, stray, word, word])
    assert text.startswith("ß") and text.endswith("aa")


# Vocabularies of words and their parts, by each decoder that joins them.
PARTS = ["[UNK]", "play", "##ing", ".", "n't", "##.", "▁", "▁the", "a", "lo", "w</w>", ".</w>"]


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(prefix="##", cleanup=True),
        decoders.WordPiece(prefix="##", cleanup=False),
        decoders.BPEDecoder(suffix="</w>"),
        decoders.Metaspace(prepend_scheme="always"),
        decoders.Metaspace(prepend_scheme="first"),
        decoders.Metaspace(prepend_scheme="never"),
    ],
    ids=lambda decoder: json.loads(decoder.__getstate__())["type"] if decoder else "none",
)
def test_each_decoder_streams_what_a_full_decode_gives(
    decoder: decoders.Decoder | None, tmp_path: Path
) -> None:
    fast = FastTokenizer(models.WordLevel({part: i for i, part in enumerate(PARTS)}, "[UNK]"))
    if decoder is not None:
        fast.decoder = decoder
    fast.save(str(tmp_path / "tokenizer.json"))
    tokenizer, rng = Tokenizer(str(tmp_path)), random.Random(0)
    for _ in range(300):
        prompt, tokens = (
            [rng.randrange(len(PARTS)) for _ in range(rng.randrange(most))] for most in (14, 9)
        )
        text = run(Detokenizer(tokenizer, prompt), tokens)
        assert tokenizer.decode(prompt + tokens) == tokenizer.decode(prompt) + text


# Stop strings.


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    tokens = [BYTES.encode(c)[0] for c in "xyxyxy"]
    detokenizer = Detokenizer(BYTES, [5], stop=["xy"], min_tokens=3)
    assert [detokenizer.add(token) for token in tokens[:4]] == [None, None, None, "xy"]
    assert detokenizer.text == "xy"


def test_a_stop_string_completed_by_the_bytes_of_half_a_character_is_found_at_the_end() -> None:
    detokenizer = Detokenizer(BYTES, [5], stop=["a�"])
    for token in [*BYTES.encode("za"), BYTES.encode("🦆")[0]]:
        assert detokenizer.add(token) is None
    assert detokenizer.finish() == "a�" and detokenizer.text == "z"
