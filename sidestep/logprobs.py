"""Log-probabilities, by the module that scripts for vLLM import them from."""

from sidestep.frontend.outputs import Logprob

__all__ = ["Logprob"]

__path__: list[str] = []  # what this module lacks is asked of the finder in sidestep/__init__.py
