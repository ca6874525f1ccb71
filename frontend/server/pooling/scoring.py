"""Routes /score and /rerank: pairs of texts, each with a score."""

from __future__ import annotations

from abc import abstractmethod

import msgspec

from sidestep.frontend.api.scores import Scores
from sidestep.frontend.server.pooling.protocol import (
    RankedDocument,
    Ranking,
    RerankRequest,
    Score,
    ScoreList,
    ScoreRequest,
    TextDocument,
)
from sidestep.frontend.server.pooling.vectors import Body, VectorRoute, Vectors
from sidestep.frontend.server.service.prompt_ids import token_ids_of


class PairRoute(VectorRoute[Body]):
    """Route that scores pairs of texts."""

    field: str
    """The request's field that errors of texts name."""

    @abstractmethod
    def pairs(self, request: Body) -> tuple[list[str], list[str]]:
        """Return one text and those it is compared with, or texts and others side by side."""

    async def read(self, request: Body, size: int) -> list[list[int]]:
        """Return the token ids of the prompts that the scores need. Raises ApiError."""
        service, scores = self.service, self.scores(request)
        prompts = await service.large.run(size, scores.prompts, service.llm.get_tokenizer())
        return await token_ids_of(service, self.field, prompts, size, add_special_tokens=True)

    def scores(self, request: Body) -> Scores:
        """Return the scores of the request's pairs. Raises ValidationError."""
        return Scores(self.spec, *self.pairs(request))


class ScoreRoute(PairRoute[ScoreRequest]):
    """Route that scores pairs."""

    decoder = msgspec.json.Decoder(ScoreRequest)
    kind, field = "score", "text_2"

    def pairs(self, request: ScoreRequest) -> tuple[list[str], list[str]]:
        """Return text_1 and text_2 as lists."""
        return _as_list(request.text_1), _as_list(request.text_2)

    def answer(self, request: ScoreRequest, vectors: Vectors) -> ScoreList:
        """Return the scores in the order of text_2."""
        scores = self.scores(request).of(vectors.results)
        return ScoreList(
            id=vectors.name,
            created=vectors.created,
            model=vectors.model,
            data=[Score(index=i, score=score) for i, score in enumerate(scores)],
            usage=vectors.usage,
        )


class RerankRoute(PairRoute[RerankRequest]):
    """Route that sorts documents by their relevance for a query."""

    decoder = msgspec.json.Decoder(RerankRequest)
    kind, field = "rerank", "documents"

    def pairs(self, request: RerankRequest) -> tuple[list[str], list[str]]:
        """Return the query, and the documents' texts."""
        return [request.query], [_text(document) for document in request.documents]

    def answer(self, request: RerankRequest, vectors: Vectors) -> Ranking:
        """Return the documents, the most relevant first; equal ones in the request's order."""
        scores = self.scores(request).of(vectors.results)
        order = sorted(range(len(scores)), key=lambda i: -scores[i])
        with_texts = request.return_documents is not False
        return Ranking(
            id=vectors.name,
            model=vectors.model,
            usage=vectors.usage,
            results=[
                RankedDocument(
                    index=i,
                    document=TextDocument(_text(request.documents[i]))
                    if with_texts
                    else msgspec.UNSET,
                    relevance_score=scores[i],
                )
                for i in order[: request.top_n or None]
            ],
        )


def _text(document: str | TextDocument) -> str:
    return document if isinstance(document, str) else document.text


def _as_list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
