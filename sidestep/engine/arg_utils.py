"""Options of an engine, by the module that scripts for vLLM import them from."""

from sidestep.frontend.engine_args import EngineArgs

AsyncEngineArgs = EngineArgs
"""One class holds the options of LLM and AsyncLLM."""

__all__ = ["AsyncEngineArgs", "EngineArgs"]

__path__: list[str] = []  # what this module lacks is asked of the finder in sidestep/__init__.py
