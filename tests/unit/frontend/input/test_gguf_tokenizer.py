"""The tokenizer of a GGUF file gives the tokens of the one that was written into it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

from sidestep import EngineStartError
from sidestep.frontend.input.tokenizer import Tokenizer
from sidestep.frontend.input.tokenizer_files import tokenizer_folder
from tests.gguf_files import library
from tests.other_tokenizers import LINES, PLAIN, train

NORMAL, CONTROL = 1, 3
TEXTS = [
    "Hello world, a test",
    "two  spaces",
    "def f(x):\n\treturn 1234567",
    "naïve 🦆 日本語",
    "it's",
]
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"


def byte_level() -> FastTokenizer:
    """Return a tokenizer like Qwen2's, with a small vocabulary."""
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    fast.train_from_iterator(LINES, trainer)
    fast.add_special_tokens([AddedToken("<|im_end|>", normalized=False, special=True)])
    return fast


def write(file: Path, kind: str, tokens: list[str], types: list[int], **values: Any) -> Path:
    writer = library().GGUFWriter(file, "qwen2" if kind == "gpt2" else "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in values.items():
        getattr(writer, name)(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_bytes_pairs_words_and_the_template_come_back(tmp_path: Path) -> None:
    fast = byte_level()
    vocab = sorted(fast.get_vocab().items(), key=lambda item: item[1])
    end = fast.token_to_id("<|im_end|>")
    state = json.loads(fast.to_str())
    file = write(
        tmp_path / "model.gguf",
        "gpt2",
        [token for token, _ in vocab],
        [CONTROL if index == end else NORMAL for _, index in vocab],
        add_tokenizer_pre="qwen2",
        add_token_merges=[" ".join(pair) for pair in state["model"]["merges"]],
        add_eos_token_id=end,
        add_chat_template=TEMPLATE,
    )
    folder = tokenizer_folder(str(file), "auto")
    tokenizer = Tokenizer(folder)
    for text in [*TEXTS, "before<|im_end|>after"]:
        tokens = tokenizer.encode(text)
        assert tokens == fast.encode(text).ids, text
        assert tokenizer.decode(tokens, skip_special_tokens=False) == text
    assert tokenizer.eos_token_id == end
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "hi<|im_end|>"
    assert tokenizer_folder(str(file), "auto") == folder, "it is converted once"


def test_sentencepiece_comes_back(tmp_path: Path) -> None:
    reader = train(tmp_path, model_type="bpe", **PLAIN)
    ids = range(reader.vocab_size())
    kinds = {i: 6 if reader.is_byte(i) else CONTROL if reader.is_control(i) else 1 for i in ids}
    kinds |= {reader.unk_id(): 2, reader.piece_to_id("<|im_start|>"): 4}
    file = write(
        tmp_path / "model.gguf",
        "llama",
        [reader.id_to_piece(i) for i in ids],
        [kinds[i] for i in ids],
        add_token_scores=[reader.get_score(i) for i in ids],
        add_bos_token_id=reader.bos_id(),
        add_eos_token_id=reader.eos_id(),
        add_unk_token_id=reader.unk_id(),
    )
    tokenizer = Tokenizer(tokenizer_folder(str(file), "auto"))
    for text in TEXTS:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert tokens == reader.encode(text), text
        assert tokenizer.decode(tokens) == text
        assert tokenizer.encode(text) == [reader.bos_id(), *tokens]
    assert tokenizer.eos_token_id == reader.eos_id()


@pytest.mark.parametrize(
    ("kind", "words", "problem"),
    [
        ("gpt2", "unheard-of", "tokenizer.ggml.pre 'unheard-of', which is not .* option tokenizer"),
        ("rwkv", "default", "tokenizer.ggml.model 'rwkv', .* supported are gpt2, llama"),
    ],
)
def test_what_would_be_divided_otherwise_is_refused(
    kind: str, words: str, problem: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "model.gguf", kind, ["a"], [NORMAL], add_tokenizer_pre=words)
    with pytest.raises(EngineStartError, match=problem):
        tokenizer_folder(str(file), "auto")
