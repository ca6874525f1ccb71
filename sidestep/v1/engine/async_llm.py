"""AsyncLLM, by the module that scripts for vLLM import it from."""

from sidestep.frontend.async_llm import AsyncLLM

__all__ = ["AsyncLLM"]

__path__: list[str] = []  # what this module lacks is asked of the finder in sidestep/__init__.py
