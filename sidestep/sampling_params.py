"""Parameters of requests, by the module that scripts for vLLM import them from."""

from sidestep.ipc.beam_search_params import BeamSearchParams
from sidestep.ipc.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams
from sidestep.ipc.structured_outputs import StructuredOutputsParams

__all__ = ["BeamSearchParams", "RepetitionDetectionParams", "RequestOutputKind", "SamplingParams",
           "StructuredOutputsParams"]

__path__: list[str] = []  # what this module lacks is asked of the finder in sidestep/__init__.py
