"""LLM, under the name of vLLM's module."""

from sidestep.frontend.api.llm import LLM

__all__ = ["LLM"]

# The finder in sidestep/__init__.py answers for names that this module lacks.
__path__: list[str] = []
