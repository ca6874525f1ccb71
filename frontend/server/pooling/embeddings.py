"""Routes /v1/embeddings, /pooling and /classify: one vector for each prompt."""

from __future__ import annotations

import base64

import msgspec
import numpy as np

from sidestep.frontend.server.pooling.protocol import (
    Classification,
    ClassificationList,
    ClassifyRequest,
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
    Pooled,
    PooledList,
    PoolingRequest,
)
from sidestep.frontend.server.pooling.vectors import InputRoute, Vectors
from sidestep.frontend.server.service.service import Service
from sidestep.frontend.server.transport.errors import ApiError
from sidestep.ipc.params.pooling_params import PoolingTask
from sidestep.ipc.transport.step import Float32


def written(vector: Float32, encoding: str | None) -> list[float] | str:
    """Return a vector in the form that a request asks for: numbers, or base64 of float32."""
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers


def check_task(service: Service, task: PoolingTask) -> None:
    """Raise ApiError (400) for a route that the model's vectors do not serve."""
    spec = service.llm.pooling
    if spec is not None and spec.task != task:
        other = "embeddings" if spec.task == "embed" else "classes and scores"
        raise ApiError(400, f"this server's model makes {other}", code="unsupported_task")


class EmbeddingRoute(InputRoute[EmbeddingRequest]):
    """Route that makes embeddings."""

    decoder = msgspec.json.Decoder(EmbeddingRequest)
    kind = "embd"

    def check(self, request: EmbeddingRequest) -> None:
        """Raise ApiError for a model that classifies."""
        check_task(self.service, "embed")

    def answer(self, request: EmbeddingRequest, vectors: Vectors) -> EmbeddingList:
        """Return the embeddings in the order of the prompts."""
        return EmbeddingList(
            id=vectors.name,
            created=vectors.created,
            model=vectors.model,
            data=[
                Embedding(index=i, embedding=written(vector, request.encoding_format))
                for i, vector in enumerate(vectors.results)
            ],
            usage=vectors.usage,
        )


class PoolingRoute(InputRoute[PoolingRequest]):
    """Route that makes vectors of any kind."""

    decoder = msgspec.json.Decoder(PoolingRequest)
    kind = "pool"

    def answer(self, request: PoolingRequest, vectors: Vectors) -> PooledList:
        """Return the vectors in the order of the prompts."""
        return PooledList(
            id=vectors.name,
            created=vectors.created,
            model=vectors.model,
            data=[
                Pooled(index=i, data=written(vector, request.encoding_format))
                for i, vector in enumerate(vectors.results)
            ],
            usage=vectors.usage,
        )


class ClassifyRoute(InputRoute[ClassifyRequest]):
    """Route that classifies."""

    decoder = msgspec.json.Decoder(ClassifyRequest)
    kind = "classify"

    def check(self, request: ClassifyRequest) -> None:
        """Raise ApiError for a model that makes embeddings."""
        check_task(self.service, "classify")

    def answer(self, request: ClassifyRequest, vectors: Vectors) -> ClassificationList:
        """Return the classes in the order of the prompts."""
        return ClassificationList(
            id=vectors.name,
            created=vectors.created,
            model=vectors.model,
            data=[self._class(i, vector) for i, vector in enumerate(vectors.results)],
            usage=vectors.usage,
        )

    def _class(self, index: int, vector: Float32) -> Classification:
        labels = self.spec.labels
        return Classification(
            index=index,
            label=labels[int(np.argmax(vector))] if len(labels) > 1 else None,
            probs=vector.tolist(),
            num_classes=len(labels),
        )
