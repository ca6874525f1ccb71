"""Outputs of requests, under the name of vLLM's module."""

from sidestep.frontend.output.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    RequestOutput,
)

__all__ = ["BeamSearchOutput", "BeamSearchSequence", "CompletionOutput", "RequestOutput"]

# The finder in sidestep/__init__.py answers for names that this module lacks.
__path__: list[str] = []
