"""LLM, by the module that scripts for vLLM import it from."""

from sidestep.frontend.llm import LLM

__all__ = ["LLM"]

__path__: list[str] = []  # what this module lacks is asked of the finder in sidestep/__init__.py
