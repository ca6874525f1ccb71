"""vLLM's names on LLM and AsyncLLM, which are accepted or refused.

Arguments of vLLM's are accepted if they ask for what Sidestep does anyway; all other names are
refused. The tables are in ipc/vllm. Type checkers see only the names that exist here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from sidestep.ipc.common.errors import UnsupportedError
from sidestep.ipc.vllm.calls import ARGUMENTS, METHODS, TOKENIZER_METHODS
from sidestep.ipc.vllm.foreign import translate

P = ParamSpec("P")
R = TypeVar("R")


def takes_vllm_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function be called with vLLM's arguments that ask for what Sidestep does anyway.

    Other arguments of vLLM's raise ValidationError. The decorated function keeps its name and
    signature.
    """
    own = inspect.signature(function).parameters
    table = {name: foreign for name, foreign in ARGUMENTS.items() if name not in own}

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if table.keys().isdisjoint(kwargs):
            return function(*args, **kwargs)
        return function(*args, **translate(kwargs, table))

    return call


class _Refusing:
    """The base of classes that name the replacement of an attribute of vLLM's."""

    _INSTEAD: Mapping[str, str] = {}

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            kind = type(self).__name__
            if (instead := self._INSTEAD.get(name)) is not None:
                raise UnsupportedError(f"{kind}.{name}: {instead}")
            raise AttributeError(f"{kind!r} object has no attribute {name!r}", name=name, obj=self)


class RefusesVllmMethods(_Refusing):
    """The base of classes that refuse the methods of vLLM's engines.

    `hasattr` is false of these methods, and calling them raises UnsupportedError.
    """

    _INSTEAD = METHODS


class RefusesTokenizerMethods(_Refusing):
    """The base of classes that refuse methods of transformers' tokenizers.

    It refuses those that do not exist here.
    """

    _INSTEAD = TOKENIZER_METHODS
