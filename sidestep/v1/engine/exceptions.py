"""Errors of an engine, by the module that scripts for vLLM import them from."""

from sidestep.ipc.errors import EngineDeadError

__all__ = ["EngineDeadError"]

__path__: list[str] = []  # what this module lacks is asked of the finder in sidestep/__init__.py
