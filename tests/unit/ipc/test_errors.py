"""Errors pass unchanged between a program's own processes, whatever their arguments are."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterator

import pytest

from sidestep.ipc.common import errors
from sidestep.ipc.common.errors import SidestepError, ValidationError


def kinds(base: type[SidestepError] = SidestepError) -> Iterator[type[SidestepError]]:
    for kind in base.__subclasses__():
        yield kind
        yield from kinds(kind)


def make(kind: type[SidestepError]) -> SidestepError:
    """Make an error of this class, with arguments that its constructor accepts."""
    own = next((base for base in kind.__mro__ if "__init__" in vars(base)), None)
    if own is None or not issubclass(own, SidestepError):
        return kind("what went wrong")
    needed = [
        p
        for p in inspect.signature(own.__init__).parameters.values()
        if p.name != "self" and p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    return kind(*(7 if p.annotation == "int" else p.name for p in needed))


KINDS = sorted(
    {kind for kind in kinds() if kind.__module__ == errors.__name__},
    key=lambda kind: kind.__name__,
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "through",
    [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy],
    ids=["pickle", "copy", "deepcopy"],
)
def test_an_error_comes_out_as_it_went_in(kind: type[SidestepError], through: object) -> None:
    error = make(kind)
    assert callable(through)
    twin = through(error)
    assert (
        type(twin) is kind
        and str(twin) == str(error)
        and twin.args == error.args
        and vars(twin) == vars(error)
    )


def test_one_of_several_is_named() -> None:
    error = ValidationError("prompt", "is empty: all of it").in_list("prompts", 3)
    assert (str(error), error.field) == ("prompts[3]: is empty: all of it", "prompts[3]")
