"""The bytes of a token, for each way in which vocabularies are written."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sidestep.frontend.input.token_alphabet import TokenAlphabet

TEXTS = ["def naïve(日本):\n\treturn '✓ 🙂'\n", "  a\u00a0b\u00ad\x00\x7f"]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        TEXTS * 3,
        trainers.BpeTrainer(
            vocab_size=290,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    return tokenizer


def with_fallback(decoder: decoders.Decoder) -> Tokenizer:
    """Return a vocabulary of SentencePiece, as Llama and Mistral have it."""
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "d",
        "e",
        "f",
        "a",
        "b",
        "de",
        "def",
        "▁def",
    ]
    tokenizer = Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)},
            [("d", "e"), ("de", "f"), ("▁", "def")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.decoder = decoder
    return tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_byte_level_tokens(text: str) -> None:
    tokenizer = byte_level()
    alphabet = TokenAlphabet(tokenizer)
    assert b"".join(map(alphabet.bytes_of, tokenizer.encode(text).tokens)).decode() == text


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    ],
    ids=["replace", "metaspace"],
)
@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_tokens_with_byte_fallback(decoder: decoders.Decoder, text: str) -> None:
    tokenizer = with_fallback(decoder)
    alphabet = TokenAlphabet(tokenizer)
    tokens = tokenizer.encode(text.replace(" ", "▁")).tokens
    assert b"".join(map(alphabet.bytes_of, tokens)).decode() == text
    assert alphabet.bytes_of("▁def") == b" def"


def test_tokens_of_words_and_their_parts() -> None:
    pieces = Tokenizer(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2}, unk_token="[UNK]"))
    pieces.decoder = decoders.WordPiece(prefix="##")
    alphabet = TokenAlphabet(pieces)
    assert [alphabet.bytes_of(token) for token in ("play", "##ing")] == [b" play", b"ing"]
    ends = Tokenizer(models.BPE({"low</w>": 0, "lo": 1}, [], end_of_word_suffix="</w>"))
    ends.decoder = decoders.BPEDecoder(suffix="</w>")
    alphabet = TokenAlphabet(ends)
    assert [alphabet.bytes_of(token) for token in ("low</w>", "lo")] == [b"low ", b"lo"]


def test_other_tokens_are_their_text() -> None:
    alphabet = TokenAlphabet(Tokenizer(models.WordLevel({"wörd": 0})))
    assert alphabet.bytes_of("wörd") == "wörd".encode()
