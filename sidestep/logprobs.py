"""Log-probabilities, under the name of vLLM's module."""

from sidestep.frontend.output.outputs import Logprob

__all__ = ["Logprob"]

# The finder in sidestep/__init__.py answers for names that this module lacks.
__path__: list[str] = []
