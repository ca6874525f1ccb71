"""Forms of prompts, under the name of vLLM's module."""

from sidestep.frontend.input.prompts import ChatPrompt, TextPrompt, TokensPrompt
from sidestep.frontend.input.prompts import Prompt as PromptType

__all__ = ["ChatPrompt", "PromptType", "TextPrompt", "TokensPrompt"]

# The finder in sidestep/__init__.py answers for names that this module lacks.
__path__: list[str] = []
