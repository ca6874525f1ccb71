"""Outputs of requests, under the name of vLLM's module."""

from sidestep.frontend.output.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    RequestOutput,
)
from sidestep.frontend.output.pooling_outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
)

__all__ = [
    "BeamSearchOutput",
    "BeamSearchSequence",
    "ClassificationOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "PoolingOutput",
    "PoolingRequestOutput",
    "RequestOutput",
    "ScoringOutput",
]

# The finder in sidestep/__init__.py answers for names that this module lacks.
__path__: list[str] = []
