"""Large bodies: their values are counted before they are made."""

from __future__ import annotations

import json
import random
import threading
from typing import Any

import msgspec
import pytest

from sidestep.frontend.server.transport import large_bodies
from sidestep.frontend.server.transport.errors import ApiError
from sidestep.frontend.server.transport.large_bodies import LargeBodies, has_more_values


class Prompt(msgspec.Struct):
    prompt: Any


DECODER = msgspec.json.Decoder(Prompt)


def num_values(value: Any) -> int:
    """Return the number of commas and opening brackets that a parser sees."""
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return 1 + max(0, len(value) - 1) + sum(map(num_values, inner))
    return 0


def random_value(dice: random.Random, depth: int) -> Any:
    kind = dice.randrange(5 if depth else 3)
    if kind == 3:
        return [random_value(dice, depth - 1) for _ in range(dice.randrange(5))]
    if kind == 4:
        return {
            random_value(dice, 0): random_value(dice, depth - 1) for _ in range(dice.randrange(5))
        }
    return "".join(dice.choices([",", "[", "{", '"', "\\", "a", "中"], k=dice.randrange(8)))


@pytest.mark.parametrize("piece", [1, 3, 1 << 20])
def test_values_are_counted_as_a_parser_counts_them(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_bodies, "_PIECE", piece)
    dice = random.Random(piece)
    for _ in range(300):
        value = random_value(dice, 4)
        data = json.dumps(value, ensure_ascii=bool(dice.randrange(2))).encode()
        num = num_values(value)
        assert not has_more_values(data, num), data
        assert num == 0 or has_more_values(data, num - 1), data


@pytest.mark.parametrize("data", [b'"' + b'\\"' * 9, b'"' * 9, b"", b'{"a":"', b'\\\\"', b"[" * 9])
def test_what_is_no_json_is_counted_too(data: bytes) -> None:
    has_more_values(data, 3)


def bodies() -> LargeBodies:
    return LargeBodies(1000)


async def test_a_body_of_too_many_values_is_never_decoded() -> None:
    body = b'{"prompt":[' + b"1," * 100_000 + b"1]}"
    with pytest.raises(ApiError, match="more than 1000 values") as caught:
        await bodies().decode(body, DECODER)
    assert caught.value.status == 413 and caught.value.body.error.code == "body_too_large"


async def test_the_text_of_a_long_string_counts_as_one_value() -> None:
    body = b'{"prompt":"' + b'[1],\\"' * 100_000 + b'"}'
    assert len((await bodies().decode(body, DECODER)).prompt) == 500_000


@pytest.mark.parametrize(
    ("size", "is_here"), [(large_bodies.LARGE, True), (large_bodies.LARGE + 1, False)]
)
async def test_only_the_work_of_large_bodies_goes_to_a_thread(size: int, is_here: bool) -> None:
    thread = await bodies().run(size, threading.get_ident)
    assert (thread == threading.get_ident()) is is_here
