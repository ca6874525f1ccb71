"""The bound on a text's length.

The server refuses a text that cannot fit by its length, and refuses no text that fits.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from sidestep import ValidationError
from sidestep.frontend.input.prompt_limit import PromptLimit
from sidestep.frontend.input.text_bound import TextBound
from sidestep.frontend.input.tokenizer import Tokenizer
from sidestep.ipc.common.errors import PromptTooLongError
from tests.unit.frontend.fakes import input_processor

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
CHARACTERS = ["a", "b", " ", "\n", "é", "e\u0301", "\u1fef", "中", "🦆", "<x>", "<mask>", "zz"]


def byte_level(**settings: Any) -> FastTokenizer:
    """Make a tokenizer with a vocabulary of bytes, of runs of 'a' and of runs of spaces."""
    merges = [("a", "a"), ("aa", "aa"), ("aaaa", "aaaa"), ("Ġ", "Ġ")]
    words = [*ALPHABET, *(one + two for one, two in merges)]
    tokenizer = FastTokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<x>", special=True)])
    if settings.get("absorbing"):
        tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True)])
    if (normalizer := settings.get("normalizer")) is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


def byte_fallback(**settings: object) -> FastTokenizer:
    """Make a tokenizer like Llama 2's.

    It has no pre-tokenizer, and spaces are written as another character.
    """
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "aa", "▁"]
    tokenizer = FastTokenizer(
        models.BPE(
            {word: i for i, word in enumerate(words)},
            [("a", "a")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return tokenizer


def unknown(*, fuse: bool, unk: str | None = "?") -> FastTokenizer:
    words = {"?": 0, "a": 1, "b": 2}
    return FastTokenizer(models.BPE(words, [], unk_token=unk, fuse_unk=fuse))


def words(model: models.Model) -> FastTokenizer:
    tokenizer = FastTokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


BOUNDED: list[Callable[[], FastTokenizer]] = [
    byte_level,
    byte_fallback,
    lambda: byte_level(absorbing=True),
    lambda: unknown(fuse=False),
    lambda: byte_level(normalizer=normalizers.NFC()),
    lambda: byte_level(normalizer=normalizers.NFKC()),
    lambda: byte_level(normalizer=normalizers.Replace("zz", "z")),
    lambda: byte_level(normalizer=normalizers.NFD()),
]
UNBOUNDED: list[Callable[[], FastTokenizer]] = [
    lambda: unknown(fuse=True),
    lambda: unknown(fuse=False, unk=None),
    lambda: words(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
    lambda: words(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
    lambda: FastTokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0)),
    lambda: byte_level(normalizer=normalizers.Strip()),
    lambda: byte_level(normalizer=normalizers.Replace("zz", "")),
    lambda: byte_level(normalizer=normalizers.Replace(Regex(" +"), " ")),
    lambda: byte_level(normalizer=normalizers.BertNormalizer()),
]


@pytest.mark.parametrize("make", BOUNDED)
def test_no_text_has_fewer_tokens_than_its_bounds(make: Callable[[], FastTokenizer]) -> None:
    tokenizer, dice = make(), random.Random(7)
    bound = TextBound(tokenizer)
    assert bound.characters is not None
    texts = ["".join(dice.choices(CHARACTERS, k=dice.randint(1, 60))) for _ in range(300)]
    texts += [character * 40 for character in CHARACTERS] + [
        " " * 40 + "<mask>" + " " * 40,
        "a b" * 30,
    ]
    for text in texts:
        num = len(tokenizer.encode(text, add_special_tokens=False))
        assert bound.least_tokens(text) <= num, text
        assert bound.counted_least_tokens(text) <= num, text
    assert bound.least_tokens("b" * 10_000) > 100


def test_the_bounds_are_reached() -> None:
    bound = TextBound(byte_level())
    assert bound.least_tokens("a" * 80) == bound.counted_least_tokens("a" * 80) == 10
    # The bytes give a better bound: no token of more than one byte has any of these.
    assert bound.counted_least_tokens("中b" * 10) == 40


@pytest.mark.parametrize("make", UNBOUNDED)
def test_where_text_may_vanish_there_is_no_bound(make: Callable[[], FastTokenizer]) -> None:
    bound = TextBound(make())
    assert bound.characters is None
    assert bound.least_tokens("b" * 10_000) == bound.counted_least_tokens("b" * 10_000) == 0


def test_the_bundled_model_is_bounded_by_its_longest_token(tokenizer: Tokenizer) -> None:
    longest = max(tokenizer.fast.get_vocab(), key=len)
    assert tokenizer.bound.characters == len(longest)


class Counted(Tokenizer):
    """A tokenizer that counts the texts that reach the library."""

    def __init__(self, one: Tokenizer) -> None:
        self.fast, self.bound, self.num = one.fast, one.bound, 0

    def encode(
        self, text: str, add_special_tokens: bool = True, limit: PromptLimit | None = None
    ) -> list[int]:
        self.num += 1
        return super().encode(text, add_special_tokens, limit)


CHAT = [{"role": "user", "content": "x" * 20_000}]


@pytest.mark.parametrize(
    "prompt", ["x" * 20_000, {"prompt": "\n" * 20_000}, "中" * 20_000, " " * 20_000]
)
async def test_a_text_that_cannot_fit_never_reaches_the_tokenizer(
    tokenizer: Tokenizer, prompt: Any
) -> None:
    counted: Any = Counted(tokenizer)
    with pytest.raises(PromptTooLongError, match=r"has at least \d+ tokens.*max_model_len \(100\)"):
        await input_processor(counted).process(prompt, None)
    with pytest.raises(PromptTooLongError, match="prompt: has at least"):
        await input_processor(counted).tokenize("x" * 20_000)
    assert counted.num == 0


async def test_a_very_long_text_is_counted_before_it_is_tokenised(tokenizer: Tokenizer) -> None:
    counted = Counted(tokenizer)
    assert tokenizer.bound.least_tokens("中" * 300_000) < 20_000
    with pytest.raises(PromptTooLongError, match="at least"):
        await input_processor(counted, 20_000).process("中" * 300_000, None)
    assert counted.num == 0
    with pytest.raises(ValidationError, match="not valid text"):
        await input_processor(counted, 20_000).process("\ud83d" * 300_000, None)


async def test_the_longest_text_that_fits_is_taken(tokenizer: Tokenizer) -> None:
    longest = max((tokenizer.decode([i]) for i in range(tokenizer.vocab_size)), key=len)
    separate = [longest, "\n\n"]  # the tokenizer would cut runs of these in another way
    text = "".join(separate[i % 2] for i in range(99))
    ids = tokenizer.encode(text)
    inputs = input_processor(tokenizer, len(ids) + 1)
    assert (await inputs.process(text, None)).prompt_token_ids == ids
    with pytest.raises(PromptTooLongError, match=rf"has {len(ids)} tokens"):
        await input_processor(tokenizer, len(ids)).process(text, None)


async def test_a_chat_that_cannot_fit_is_refused_too(tokenizer: Tokenizer) -> None:
    counted = Counted(tokenizer)
    counted.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    counted._special_tokens = {}
    with pytest.raises(PromptTooLongError):
        await input_processor(counted).process(CHAT, None)
    assert counted.num == 0


def test_the_state_of_parts_is_json(tokenizer: Tokenizer) -> None:
    """Check that the settings of a tokenizer's parts are JSON.

    The library gives them as a tokenizer's file has them, and the bound reads them.
    """
    part = pre_tokenizers.Split(" ", "removed")
    assert json.loads(part.__getstate__())["behavior"] == "Removed"
    removing = byte_level()
    removing.pre_tokenizer = pre_tokenizers.Sequence([part, removing.pre_tokenizer])
    assert TextBound(removing).characters is None
