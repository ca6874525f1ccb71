"""Parameters of requests, under the name of vLLM's module."""

from sidestep.ipc.params.beam_search_params import BeamSearchParams
from sidestep.ipc.params.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
)
from sidestep.ipc.params.structured_outputs_params import StructuredOutputsParams

__all__ = [
    "BeamSearchParams",
    "RepetitionDetectionParams",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]

# The finder in sidestep/__init__.py answers for names that this module lacks.
__path__: list[str] = []
