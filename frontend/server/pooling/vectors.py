"""The common part of the routes for vectors: from a body to prompts, and on to results."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sidestep.frontend.output.outputs import RequestOutput
from sidestep.frontend.output.pooling_outputs import check_params
from sidestep.frontend.server.pooling.protocol import (
    MAX_INPUTS,
    InputFields,
    PoolingFields,
    PoolingUsage,
)
from sidestep.frontend.server.schemas.fields import refuse_not_yet, refuse_unless
from sidestep.frontend.server.schemas.protocol import PromptDetails
from sidestep.frontend.server.service.prompt_ids import split_prompts, token_ids_of
from sidestep.frontend.server.service.service import Choice, Service, new_id
from sidestep.frontend.server.transport.connection import while_connected
from sidestep.frontend.server.transport.errors import ApiError, refused
from sidestep.ipc.common.errors import RequestError
from sidestep.ipc.model.pooling_spec import PoolingSpec
from sidestep.ipc.transport.step import Float32

_NUMBER_BYTES = 20
"""Bytes of a number in an answer, about."""
Body = TypeVar("Body", bound=PoolingFields)


@dataclass(frozen=True, kw_only=True)
class Vectors:
    """The results of all prompts of a request."""

    name: str
    """Id of the answer."""
    model: str
    results: list[Float32]
    usage: PoolingUsage
    created: int = field(default_factory=lambda: int(time.time()))


class VectorRoute(ABC, Generic[Body]):
    """Route whose answer follows from the vectors of its prompts."""

    decoder: msgspec.json.Decoder[Body]
    kind: str
    """Beginning of the answers' ids."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def __call__(self, http: Request, body: bytes) -> Response:
        """Answer a request. Raises ApiError, ValidationError and ClientGoneError."""
        service, size = self.service, len(body)
        request = await service.large.decode(body, self.decoder)
        model = service.check_model(request.model)
        refuse_not_yet(request)
        refuse_unless("stream", request.stream, False)
        check_params(request.params, self.spec)
        self.check(request)
        prompts = await self.read(request, size)
        choices = service.pooling_choices(http, new_id(self.kind), prompts, request.params, request)
        return await while_connected(self._answer(request, model, choices), http.receive)

    @property
    def spec(self) -> PoolingSpec:
        """The engine's vectors."""
        assert self.service.llm.pooling is not None, "the route of another engine"
        return self.service.llm.pooling

    def check(self, request: Body) -> None:
        """Raise ApiError if the model cannot serve the request."""

    @abstractmethod
    async def read(self, request: Body, size: int) -> list[list[int]]:
        """Return the token ids of all prompts. Raises ApiError. size: bytes of the body."""

    @abstractmethod
    def answer(self, request: Body, vectors: Vectors) -> msgspec.Struct:
        """Return the body of the answer."""

    async def _answer(self, request: Body, model: str, choices: Sequence[Choice]) -> Response:
        service = self.service
        outputs = await service.whole(choices)
        try:
            results = [
                service.result_of(choice, output)
                for choice, output in zip(choices, outputs, strict=True)
            ]
        except RequestError as error:  # by its deadline, or by the end of the server
            raise ApiError(503, str(error), kind="server_error", code="aborted") from None
        vectors = Vectors(
            name=choices[0].request_id.rpartition("-")[0],
            model=model,
            results=results,
            usage=usage_of(outputs),
        )

        def encode() -> bytes:
            return msgspec.json.encode(self.answer(request, vectors))

        size = _NUMBER_BYTES * sum(map(len, results))
        return Response(
            await service.large.run(size, encode),
            media_type="application/json",
            headers={"x-request-id": vectors.name},
        )


class InputRoute(VectorRoute[Body]):
    """Route whose prompts are the field `input`."""

    async def read(self, request: Body, size: int) -> list[list[int]]:
        """Return the token ids of all prompts. Raises ApiError."""
        assert isinstance(request, InputFields)
        service = self.service
        prompts = await service.large.run(size, split_prompts, "input", request.input)
        if len(prompts) > MAX_INPUTS:
            raise refused("input", f"{len(prompts)} prompts are more than {MAX_INPUTS}")
        special = request.add_special_tokens is not False
        return await token_ids_of(service, "input", prompts, size, add_special_tokens=special)


def usage_of(outputs: Sequence[RequestOutput]) -> PoolingUsage:
    """Return the tokens of all prompts."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens or 0 for output in outputs)
    return PoolingUsage(prompt, prompt, PromptDetails(cached))
