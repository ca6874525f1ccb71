"""Requests for vectors of prompts, and their answers, in the shapes of OpenAI's and vLLM's APIs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from sidestep.frontend.server.schemas.fields import ClientFields, Count, Natural
from sidestep.frontend.server.schemas.protocol import PromptDetails
from sidestep.frontend.server.service.prompt_ids import Prompts
from sidestep.ipc.params.pooling_params import PoolingParams

MAX_INPUTS = 2048
"""Largest number of prompts of one request, as in OpenAI's API."""
Text = Annotated[str, msgspec.Meta(min_length=1)]
Texts = Text | Annotated[list[Text], msgspec.Meta(min_length=1, max_length=MAX_INPUTS)]


class PoolingFields(ClientFields, kw_only=True, forbid_unknown_fields=True):
    """Fields of all requests for vectors."""

    use_activation: bool | None = None
    """Whether results are normalised: embeddings to length 1, a head's outputs to probabilities.

    The model's own setting if not given."""
    # Not implemented: see fields.NOT_YET.
    truncate_prompt_tokens: Any = None

    @property
    def params(self) -> PoolingParams:
        """Parameters of its requests to the engine. Raises ValidationError."""
        return PoolingParams(use_activation=self.use_activation)


class InputFields(PoolingFields, kw_only=True, forbid_unknown_fields=True):
    """Fields of requests whose prompts have one vector each."""

    input: Prompts
    """Prompt as text or token ids, or a list of either."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds the model's special tokens to a text; true if not given."""


class EmbeddingRequest(InputFields, kw_only=True, forbid_unknown_fields=True):
    """Body of a request to /v1/embeddings."""

    encoding_format: Literal["float", "base64"] | None = None
    """Form of a vector: a list of numbers, or float32 values in little-endian order as base64."""
    dimensions: Count | None = None
    """Length of the embeddings: their first values, normalised again."""
    normalize: bool | None = None
    """Another name of use_activation."""

    @property
    def params(self) -> PoolingParams:
        """Parameters of its requests to the engine. Raises ValidationError."""
        return PoolingParams(
            dimensions=self.dimensions,
            use_activation=self.use_activation,
            normalize=self.normalize,
        )


class PoolingRequest(EmbeddingRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of a request to /pooling."""


class ClassifyRequest(InputFields, kw_only=True, forbid_unknown_fields=True):
    """Body of a request to /classify."""


class ScoreRequest(PoolingFields, kw_only=True, forbid_unknown_fields=True):
    """Body of a request to /score."""

    text_1: Texts
    """One text, or as many as text_2 has."""
    text_2: Texts


class TextDocument(msgspec.Struct, forbid_unknown_fields=True):
    """Document of a request to /rerank, or of its answer."""

    text: Text


class RerankRequest(PoolingFields, kw_only=True, forbid_unknown_fields=True):
    """Body of a request to /rerank, in the shape of Jina's and Cohere's APIs."""

    query: Text
    documents: Annotated[
        list[Text | TextDocument], msgspec.Meta(min_length=1, max_length=MAX_INPUTS)
    ]
    top_n: Natural | None = None
    """Number of documents in the answer, the most relevant ones; all if it is 0 or not given."""
    return_documents: bool | None = None
    """Whether the answer has the documents' texts; true if not given."""


class PoolingUsage(msgspec.Struct):
    """Number of tokens of all prompts together."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Embedding(msgspec.Struct, kw_only=True):
    """Embedding of one prompt."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingList(msgspec.Struct, kw_only=True):
    """Answer to /v1/embeddings."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: PoolingUsage


class Pooled(msgspec.Struct, kw_only=True):
    """Vector of one prompt."""

    object: Literal["pooling"] = "pooling"
    index: int
    data: list[float] | str


class PooledList(msgspec.Struct, kw_only=True):
    """Answer to /pooling."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Pooled]
    usage: PoolingUsage


class Classification(msgspec.Struct, kw_only=True):
    """Classes of one prompt."""

    index: int
    label: str | None
    """Name of the most probable label; null if the model has one output, which is no label."""
    probs: list[float]
    """Probability of each label, or the head's own outputs."""
    num_classes: int


class ClassificationList(msgspec.Struct, kw_only=True):
    """Answer to /classify."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Classification]
    usage: PoolingUsage


class Score(msgspec.Struct, kw_only=True):
    """Score of one pair of texts."""

    object: Literal["score"] = "score"
    index: int
    score: float


class ScoreList(msgspec.Struct, kw_only=True):
    """Answer to /score."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage


class RankedDocument(msgspec.Struct, kw_only=True):
    """One document of the answer to /rerank."""

    index: int
    """Place of the document in the request."""
    document: TextDocument | msgspec.UnsetType = msgspec.UNSET
    relevance_score: float


class Ranking(msgspec.Struct, kw_only=True):
    """Answer to /rerank, the most relevant document first."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[RankedDocument]
