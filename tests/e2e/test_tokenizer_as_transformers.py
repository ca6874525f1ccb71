"""The tokenizer's methods return the same results as those of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

import sidestep
from sidestep.frontend.input.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(sidestep.DEFAULT_MODEL)


def test_the_tokenizer_is_as_transformers_has_it(tokenizer: Tokenizer) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(sidestep.DEFAULT_MODEL)
    text = "def get_name(self):\n    return 'é'<|endoftext|>"
    ids = theirs.encode(text)
    assert tokenizer.encode(text) == ids == tokenizer(text).input_ids
    assert dict(tokenizer([text, "a"])) == {
        key: theirs([text, "a"])[key] for key in ("input_ids", "attention_mask")
    }
    for skip in (False, True):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == theirs.decode(
            ids, skip_special_tokens=skip
        )
    assert tokenizer.decode(ids) == theirs.decode(ids) and tokenizer.decode(
        ids[0]
    ) == theirs.decode(ids[0])
    assert tokenizer.batch_decode([ids, ids[:2]]) == theirs.batch_decode([ids, ids[:2]])
    assert tokenizer.tokenize("a b") == theirs.tokenize("a b")
    assert tokenizer.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
    assert tokenizer.convert_tokens_to_ids(["a", "b"]) == theirs.convert_tokens_to_ids(["a", "b"])
    assert tokenizer.get_vocab() == theirs.get_vocab() == tokenizer.vocab
    for name in ("eos_token", "eos_token_id", "bos_token_id", "pad_token_id", "is_fast"):
        assert getattr(tokenizer, name) == getattr(theirs, name), name


@pytest.mark.parametrize(
    "more", [{}, {"add_generation_prompt": True}, {"continue_final_message": True}]
)
def test_chats_are_rendered_as_by_transformers(tokenizer: Tokenizer, more: dict[str, Any]) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(sidestep.DEFAULT_MODEL)
    chat = (
        [*CHAT, {"role": "assistant", "content": "def f("}]
        if "continue_final_message" in more
        else CHAT
    )
    assert tokenizer.apply_chat_template(
        chat, tokenize=False, **more
    ) == theirs.apply_chat_template(chat, tokenize=False, **more)
    encoded: Any = theirs.apply_chat_template(chat, return_dict=True, **more)
    ids = encoded["input_ids"]
    assert tokenizer.apply_chat_template(chat, **more) == ids
    assert tokenizer.apply_chat_template(chat, return_dict=True, **more).input_ids == ids
