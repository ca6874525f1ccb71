"""The outputs of requests to an engine that pools, and how they are made of the model's vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from sidestep.frontend.output.outputs import RequestMetrics, RequestOutput
from sidestep.ipc.common.errors import RequestError, ValidationError
from sidestep.ipc.model.pooling_spec import PoolingSpec
from sidestep.ipc.params.pooling_params import PoolingParams
from sidestep.ipc.transport.step import Float32

_LEAST_NORM = 1e-12
"""Lengths below it count as this length, so that a vector of zeros stays one."""


@dataclass(slots=True)
class PoolingOutput:
    """The result of one prompt."""

    data: Float32
    """The embedding, or the head's outputs; an array of numpy."""


@dataclass(slots=True)
class EmbeddingOutput:
    """The embedding of one prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Length of the embedding."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """The classes of one prompt."""

    probs: list[float]
    """Probability of each label, or the head's own outputs without activation."""

    @property
    def num_classes(self) -> int:
        """Number of labels."""
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """The similarity of two texts, or the relevance of one for the other."""

    score: float


Output = TypeVar("Output", PoolingOutput, EmbeddingOutput, ClassificationOutput, ScoringOutput)


@dataclass(slots=True)
class PoolingRequestOutput(Generic[Output]):
    """The only output of a request to an engine that pools."""

    request_id: str
    outputs: Output
    prompt_token_ids: list[int]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int | None = None
    """Prompt tokens that were found in the prefix cache."""


def check_params(params: PoolingParams, spec: PoolingSpec) -> None:
    """Raise ValidationError for parameters that the model cannot serve."""
    if params.task is not None and params.task != spec.task:
        raise ValidationError("task", f"must be {spec.task!r} with this model, not {params.task!r}")
    if (dimensions := params.dimensions) is None:
        return
    if spec.has_head:
        raise ValidationError("dimensions", "is about embeddings, and this model classifies")
    if dimensions > spec.width:
        raise ValidationError(
            "dimensions", f"{dimensions} is more than the model's {spec.width} values"
        )
    if not spec.is_matryoshka and dimensions != spec.width:
        raise ValidationError(
            "dimensions",
            "the model's config.json does not say that shorter embeddings have a meaning "
            '(is_matryoshka); where they have one, start with --hf-overrides \'{"is_matryoshka": '
            "true}'",
        )
    if spec.dimensions and dimensions not in (*spec.dimensions, spec.width):
        raise ValidationError(
            "dimensions",
            f"{dimensions} is none of the model's {', '.join(map(str, spec.dimensions))}",
        )


def result_of(vector: Float32, params: PoolingParams, spec: PoolingSpec) -> Float32:
    """Return the result that a request gets of the model's vector, float32 [n]."""
    values = vector if params.dimensions is None else vector[: params.dimensions]
    activation = spec.activation
    if params.activation is False:
        activation = "none"
    elif params.activation and activation == "none":
        activation = (
            "normalize" if not spec.has_head else "sigmoid" if spec.width == 1 else "softmax"
        )
    if activation == "normalize":
        return values / max(np.float32(np.linalg.norm(values)), np.float32(_LEAST_NORM))
    if activation == "softmax":
        raised = np.exp(values - values.max())
        return np.asarray(raised / raised.sum(), np.float32)
    if activation == "sigmoid":
        # The form whose exponent is not positive, so that it does not overflow.
        small = np.exp(-np.abs(values))
        return np.asarray(np.where(values >= 0, 1, small) / (1 + small), np.float32)
    return values.copy()


def pooling_output(
    output: RequestOutput, vector: Float32 | None, params: PoolingParams, spec: PoolingSpec
) -> PoolingRequestOutput[PoolingOutput]:
    """Return the output of a request that has ended. Raises RequestError if it gave no vector."""
    if vector is None:
        why = output.outputs[0].stop_reason
        raise RequestError(
            f"the request was ended before its vector was there{f': {why}' if why else ''}"
        )
    return PoolingRequestOutput(
        output.request_id,
        PoolingOutput(result_of(vector, params, spec)),
        output.prompt_token_ids,
        True,
        output.metrics,
        output.num_cached_tokens,
    )


def cosine(one: Float32, other: Float32) -> float:
    """Return the cosine of the angle between two embeddings."""
    norms = float(np.linalg.norm(one)) * float(np.linalg.norm(other))
    return float(np.dot(one, other)) / max(norms, _LEAST_NORM)
