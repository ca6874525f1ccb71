"""What requests give, by the module that scripts for vLLM import it from."""

from sidestep.frontend.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, RequestOutput

__all__ = ["BeamSearchOutput", "BeamSearchSequence", "CompletionOutput", "RequestOutput"]

__path__: list[str] = []  # what this module lacks is asked of the finder in sidestep/__init__.py
