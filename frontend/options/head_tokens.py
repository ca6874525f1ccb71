"""The tokens of a reranker whose head is made of two rows of a language model's head."""

from __future__ import annotations

import msgspec

from sidestep.frontend.input.tokenizer import Tokenizer
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.model.model_spec import ModelSpec


def with_head_tokens(spec: ModelSpec, tokenizer_path: str | None) -> ModelSpec:
    """Return the spec with the ids of the tokens that its classification head is made of.

    Raises EngineStartError for a text that is not one token.
    """
    pooling = spec.pooling
    if pooling is None or not pooling.head_tokens:
        return spec
    if tokenizer_path is None:
        raise EngineStartError("skip_tokenizer_init: classifier_from_token needs the tokenizer")
    tokenizer = Tokenizer(tokenizer_path)
    ids = []
    for text in pooling.head_tokens:
        found = tokenizer.encode(text, add_special_tokens=False)
        if len(found) != 1:
            raise EngineStartError(
                f"model: {text!r} of classifier_from_token is {len(found)} tokens, not one"
            )
        ids += found
    return msgspec.structs.replace(
        spec, pooling=msgspec.structs.replace(pooling, head_token_ids=tuple(ids))
    )
