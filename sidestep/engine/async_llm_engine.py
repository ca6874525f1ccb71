"""AsyncLLM, under the names of vLLM's older class and module."""

from sidestep.frontend.api.async_llm import AsyncLLM

AsyncLLMEngine = AsyncLLM

__all__ = ["AsyncLLMEngine"]

# The finder in sidestep/__init__.py answers for names that this module lacks.
__path__: list[str] = []
