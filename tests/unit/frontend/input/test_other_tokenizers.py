"""Tokenizers without tokenizer.json: SentencePiece, tiktoken, and others that transformers reads.

They are converted, and then give the tokens and texts of their own libraries.
"""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sidestep import DEFAULT_MODEL, EngineStartError
from sidestep.executor.processes.tokenizer_converter import convert, is_tiktoken
from sidestep.frontend.input import tokenizer_files
from sidestep.frontend.input.tokenizer import Tokenizer
from sidestep.frontend.input.tokenizer_files import tokenizer_folder
from sidestep.frontend.output.detokenizer import Detokenizer
from tests.other_tokenizers import PLAIN, train, train_tiktoken, write_tekken

KINDS: dict[str, dict[str, Any]] = {
    "bpe": {"model_type": "bpe", **PLAIN},
    "unigram": {"model_type": "unigram", **PLAIN},
    "bpe without bytes": {"model_type": "bpe"},
    "unigram without a first space": {"model_type": "unigram", "add_dummy_prefix": False},
}
TEXTS = [
    "Hello world, a test",
    "two  spaces   here",
    "def f(x):\n    return 1\n\t",
    "naïve 🦆🏳️‍🌈 日本語",
    "ends with a space ",
    "before<|im_start|>after",
    "<|im_start|>first",
    "  begins with spaces",
    "",
    " ",
]
READABLE = [text for text in TEXTS if text.isascii() and "<|" not in text]
"""Texts that a vocabulary without bytes and without added tokens has tokens for."""


Make = Callable[[str], tuple[Tokenizer, Any]]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return a function that gives the tokenizer of a kind, and its own library's reader."""
    made: dict[str, tuple[Tokenizer, Any]] = {}

    def get(kind: str) -> tuple[Tokenizer, Any]:
        if kind not in made:
            source, target = (tmp_path_factory.mktemp(name) for name in ("source", "target"))
            write = {"tiktoken": train_tiktoken, "tekken": write_tekken}.get(kind)
            reader = train(source, **KINDS[kind]) if write is None else write(source)
            convert(source, target)
            made[kind] = Tokenizer(str(target)), reader
        return made[kind]

    return get


@pytest.mark.parametrize("kind", KINDS)
def test_a_sentencepiece_model_alone_gives_sentencepiece_s_tokens_and_texts(
    kind: str, make: Make
) -> None:
    tokenizer, reader = make(kind)
    for text in TEXTS if "byte_fallback" in KINDS[kind] else READABLE:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert tokens == reader.encode(text), text
        assert tokenizer.decode(tokens) == reader.decode(tokens), text
        assert tokenizer.encode(text) == [reader.bos_id(), *tokens]
    assert tokenizer.eos_token_id == reader.eos_id() and tokenizer.bos_token_id == reader.bos_id()


def test_a_file_of_tiktoken_gives_tiktoken_s_tokens_and_texts(make: Make) -> None:
    library = pytest.importorskip("tiktoken")
    tokenizer, ranks = make("tiktoken")
    pattern = json.loads(tokenizer.fast.pre_tokenizer.__getstate__())["pretokenizers"][0]
    reader = library.Encoding(
        "test", pat_str=pattern["pattern"]["Regex"], mergeable_ranks=ranks, special_tokens={}
    )
    for text in TEXTS:
        tokens = tokenizer.encode(text)
        assert tokens == reader.encode(text, disallowed_special=()), text
        assert tokenizer.decode(tokens) == text
    assert tokenizer.eos_token_id == 400
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "hi<|end|>"


def test_a_tekken_file_gives_its_tokens_after_the_beginning_of_sequence(make: Make) -> None:
    tokenizer, ranks = make("tekken")
    for text in TEXTS:
        bos, *tokens = tokenizer.encode(text)
        assert bos == tokenizer.bos_token_id == 1 and tokenizer.eos_token_id == 2
        assert tokenizer.decode(tokens) == text
        assert [ranks[tokenizer.token_bytes(token)] for token in tokens] == tokens
    assert tokenizer.decode([1, 3, *tokenizer.encode("a")], skip_special_tokens=True) == "a"


@pytest.mark.parametrize("kind", [*KINDS, "tiktoken", "tekken"])
def test_streamed_text_is_what_a_full_decode_gives(kind: str, make: Make) -> None:
    tokenizer, _ = make(kind)
    rng = random.Random(0)
    words = [*TEXTS, "🦆", "é", " ", "▁", "日本"]

    def draw(count: int) -> list[int]:
        pieces = [rng.choice(words)[: rng.randrange(1, 9)] for _ in range(count)]
        tokens = [tokenizer.encode(piece, add_special_tokens=False) for piece in pieces]
        return [token for piece in tokens for token in piece]

    for _ in range(300):
        prompt, tokens = tokenizer.encode("a") + draw(3), draw(rng.randrange(1, 5))
        detokenizer = Detokenizer(tokenizer, prompt)
        for token in tokens:
            before = detokenizer.text
            detokenizer.add(token)
            assert detokenizer.text.startswith(before)
        detokenizer.finish()
        whole = tokenizer.decode(prompt + tokens, True)
        assert whole == tokenizer.decode(prompt, True) + detokenizer.text, (prompt, tokens)


@pytest.mark.parametrize("kind", ["bpe", "unigram", "tiktoken", "tekken"])
def test_the_bytes_of_tokens_make_up_the_text(kind: str, make: Make) -> None:
    tokenizer, _ = make(kind)
    for text in TEXTS:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        made = b"".join(map(tokenizer.token_bytes, tokens)).decode()
        assert made.removeprefix(" " if kind in KINDS else "") == text


# Tokenizers that are refused.


def problem(source: Path, mode: str = "auto") -> str:
    """Return why a folder's tokenizer is refused."""
    with pytest.raises(EngineStartError) as caught:
        tokenizer_folder(str(source), mode)
    text = str(caught.value)
    assert "\n" not in text and text.startswith(f"tokenizer: {source} ")
    return text


def problem_of_converting(source: Path) -> str:
    with pytest.raises(Exception) as caught:
        convert(source, source)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_class_that_reads_other_tokens_than_sentencepiece_is_refused(tmp_path: Path) -> None:
    train(tmp_path, **KINDS["bpe"])
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GemmaTokenizer"}')
    assert "reads as GemmaTokenizer with other tokens than SentencePiece" in (
        problem_of_converting(tmp_path)
    )


def test_a_tokenizer_in_python_is_refused(tmp_path: Path) -> None:
    train(tmp_path, **KINDS["bpe"])
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "SiglipTokenizer"}')
    assert "is read as SiglipTokenizer, a tokenizer in Python" in problem_of_converting(tmp_path)


@pytest.mark.parametrize(
    ("content", "package"),
    [(b"YQ== 0\nYg== 1\n", "tiktoken"), (b"\n\x05<unk>", "sentencepiece")],
)
def test_a_package_that_is_missing_is_named(
    tmp_path: Path, content: bytes, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    assert is_tiktoken(tmp_path / "tokenizer.model") == (package == "tiktoken")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert problem_of_converting(tmp_path) == (
        f"has tokenizer.model, which needs the package {package}: "
        "pip install 'sidestep[tokenizers]'"
    )
    assert problem(tmp_path).endswith(
        "is read by transformers, which is not installed: pip install 'sidestep[tokenizers]'"
    )


@pytest.mark.parametrize(
    "own", [{"AutoTokenizer": ["tokenization.Own", None]}, ["tokenization.Own", None]], ids=str
)
def test_code_that_comes_with_a_tokenizer_is_never_run(tmp_path: Path, own: Any) -> None:
    (tmp_path / "qwen.tiktoken").write_text("YQ== 0\n")
    (tmp_path / "tokenization.py").write_text("raise SystemExit('run')")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": own}))
    assert "has code of its own for its tokenizer (auto_map), which is never run" in (
        problem(tmp_path)
    )


# The process that converts, and its cache.


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a cache of converted tokenizers that is empty, and return its folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sidestep" / "tokenizers"


def refuse_to_spawn(*_: Any, **__: Any) -> None:
    raise AssertionError("a process was started")


def test_a_tokenizer_is_converted_once_and_again_when_its_files_change(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(DEFAULT_MODEL) / name, source)
    assert tokenizer_folder(str(source), "auto") == str(source)
    assert not cache.exists()
    found = tokenizer_folder(str(source), "hf")
    assert [str(path) for path in cache.iterdir()] == [found]
    text = "def naïve(🦆):\n    return '日本語'\n"
    assert Tokenizer(found).encode(text) == Tokenizer(str(source)).encode(text)
    with monkeypatch.context() as patched:
        patched.setattr(tokenizer_files, "spawn", refuse_to_spawn)
        assert tokenizer_folder(str(source), "hf") == found
        (source / "model.safetensors").write_bytes(b"weights")
        assert tokenizer_folder(str(source), "hf") == found
        (source / "chat_template.jinja").write_text("new")
        with pytest.raises(AssertionError, match="a process was started"):
            tokenizer_folder(str(source), "hf")
    (source / "tokenizer.json").write_text("{")
    assert "cannot be read by transformers: " in problem(source, "hf")
    assert [str(path) for path in cache.iterdir()] == [found], "halves are left behind"


def test_a_folder_without_any_tokenizer_starts_no_process(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_files, "spawn", refuse_to_spawn)
    for mode in ("auto", "hf"):
        assert tokenizer_folder(str(tmp_path), mode) == str(tmp_path)


def test_a_cache_that_cannot_be_made_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "tokenizer.model").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(EngineStartError, match=r"tokenizer: .*file/sidestep/tokenizers is the pl"):
        tokenizer_folder(str(tmp_path), "auto")
