"""Options of an engine, under the name of vLLM's module."""

from sidestep.frontend.api.engine_args import EngineArgs

AsyncEngineArgs = EngineArgs
"""One class holds the options of LLM and AsyncLLM."""

__all__ = ["AsyncEngineArgs", "EngineArgs"]

__path__: list[
    str
] = []  # the finder in sidestep/__init__.py answers for names that this module lacks
