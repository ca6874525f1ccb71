"""Forms of prompts, by the module that scripts for vLLM import them from."""

from sidestep.frontend.prompts import ChatPrompt, TextPrompt, TokensPrompt
from sidestep.frontend.prompts import Prompt as PromptType

__all__ = ["ChatPrompt", "PromptType", "TextPrompt", "TokensPrompt"]

__path__: list[str] = []  # what this module lacks is asked of the finder in sidestep/__init__.py
