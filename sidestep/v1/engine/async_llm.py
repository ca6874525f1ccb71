"""AsyncLLM, under the name of vLLM's module."""

from sidestep.frontend.api.async_llm import AsyncLLM

__all__ = ["AsyncLLM"]

# The finder in sidestep/__init__.py answers for names that this module lacks.
__path__: list[str] = []
