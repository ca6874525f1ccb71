"""Prompts of a request: texts or token ids, one or several, as lists of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, cast

import msgspec

from sidestep.frontend.server.schemas.fields import Natural
from sidestep.frontend.server.service.service import Service
from sidestep.frontend.server.transport.errors import refused

PromptText = Annotated[str, msgspec.Meta(min_length=1)]
PromptIds = Annotated[list[Natural], msgspec.Meta(min_length=1)]
Prompts = PromptText | Annotated[list[PromptText | int | PromptIds], msgspec.Meta(min_length=1)]
"""A prompt as text or token ids, or a list of either."""


def split_prompts(field: str, given: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """Return one text or list of token ids for each prompt. Raises ApiError for a mixture."""
    if isinstance(given, str):
        return [given]
    if all(isinstance(item, int) for item in given):
        if any(cast(int, item) < 0 for item in given):
            raise refused(field, "holds a negative number, which is not a token id")
        return [cast(list[int], given)]
    if not all(isinstance(item, str) for item in given) and not all(
        isinstance(item, list) for item in given
    ):
        raise refused(field, "must be text, token ids, or a list of one of these")
    return cast(list[str | list[int]], given)


async def token_ids_of(
    service: Service,
    field: str,
    prompts: Sequence[str | list[int]],
    size: int,
    *,
    add_special_tokens: bool,
) -> list[list[int]]:
    """Return the token ids of each prompt. Raises ApiError for a wrong one, which it names.

    field: the request's field that has the prompts. size: bytes of the request's body.
    """
    names = [f"{field}[{i}]" for i in range(len(prompts))] if len(prompts) > 1 else [field]
    ids = [
        await service.tokenize(name, p, add_special_tokens=add_special_tokens)
        if isinstance(p, str)
        else p
        for name, p in zip(names, prompts, strict=True)
    ]
    for name, prompt in zip(names, ids, strict=True):
        if not prompt:
            raise refused(name, "is empty")
        service.check_length(name, prompt)
    await service.large.run(size, _check_ranges, service.llm.vocab_size, names, ids)
    return ids


def _check_ranges(size: int, names: Sequence[str], prompts: Sequence[Sequence[int]]) -> None:
    for name, ids in zip(names, prompts, strict=True):
        if max(ids) >= size:
            raise refused(name, f"{max(ids)} is not a token id: the model has {size}")
