"""Options of an engine, under the name of vLLM's module."""

from sidestep.frontend.options.engine_args import EngineArgs

AsyncEngineArgs = EngineArgs
"""The class that holds the options of both LLM and AsyncLLM."""

__all__ = ["AsyncEngineArgs", "EngineArgs"]

# The finder in sidestep/__init__.py answers for names that this module lacks.
__path__: list[str] = []
