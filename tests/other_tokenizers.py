"""Small tokenizers without tokenizer.json, trained by their own libraries."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, pre_tokenizers, trainers

from sidestep.frontend.input.token_alphabet import byte_characters

VOCAB_SIZE = 400
LINES = [
    line
    for line in (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8").splitlines()
    if line.strip()
] * 4
PLAIN: dict[str, Any] = {
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "user_defined_symbols": ["<|im_start|>"],
}
"""Settings of SentencePiece like those of Llama and Mistral."""


def train(folder: Path, **settings: Any) -> Any:
    """Write a SentencePiece model alone, and return its own reader."""
    library = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=model,
        vocab_size=VOCAB_SIZE,
        minloglevel=2,
        num_threads=1,
        **settings,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return library.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


def train_ranks() -> dict[bytes, int]:
    """Return a vocabulary of bytes: the ranks of its tokens, single bytes first."""
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    fast.train_from_iterator(
        LINES,
        trainers.BpeTrainer(vocab_size=VOCAB_SIZE, show_progress=False, initial_alphabet=alphabet),
    )
    characters = byte_characters()
    tokens = sorted(fast.get_vocab().items(), key=lambda item: (len(item[0]) > 1, item[1]))
    return {
        bytes(characters[character] for character in token): rank
        for rank, (token, _) in enumerate(tokens)
    }


def write_tekken(folder: Path) -> dict[bytes, int]:
    """Write a tekken.json alone, and return its tokens' ranks, which follow its special tokens."""
    special, ranks = ["<unk>", "<s>", "</s>", "[INST]"], train_ranks()
    config = {
        "pattern": r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+",
        "num_vocab_tokens": len(ranks),
        "default_vocab_size": len(ranks) + len(special),
        "default_num_special_tokens": len(special),
        "version": "v3",
    }
    tokens = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in ranks.items()
    ]
    controls = [
        {"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(special)
    ]
    (folder / "tekken.json").write_text(
        json.dumps({"config": config, "vocab": tokens, "special_tokens": controls})
    )
    (folder / "config.json").write_text('{"model_type": "mistral"}')
    return {token: rank + len(special) for token, rank in ranks.items()}


def train_tiktoken(folder: Path) -> dict[bytes, int]:
    """Write a vocabulary in tiktoken's form, and return the ranks of its tokens."""
    pytest.importorskip("tiktoken")
    ranks = train_ranks()
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    (folder / "tokenizer.model").write_text("\n".join(lines))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|end|>",
                "added_tokens_decoder": {str(VOCAB_SIZE): {"content": "<|end|>", "special": True}},
                "chat_template": "{{ messages[0].content }}{{ eos_token }}",
            }
        )
    )
    return ranks
