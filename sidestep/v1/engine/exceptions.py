"""Errors of an engine, under the name of vLLM's module."""

from sidestep.ipc.common.errors import EngineDeadError

__all__ = ["EngineDeadError"]

# The finder in sidestep/__init__.py answers for names that this module lacks.
__path__: list[str] = []
