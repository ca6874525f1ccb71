"""The part of AsyncLLM that makes vectors of prompts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from sidestep.frontend.api.request_checks import check_task
from sidestep.frontend.input.prompts import Prompt
from sidestep.frontend.output.outputs import RequestOutput
from sidestep.frontend.output.pooling_outputs import (
    PoolingOutput,
    PoolingRequestOutput,
    check_params,
    pooling_output,
)
from sidestep.frontend.output.request_state import RequestState
from sidestep.frontend.vllm.vllm_names import takes_vllm_arguments
from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.config import EngineConfig
from sidestep.ipc.model.pooling_spec import PoolingSpec
from sidestep.ipc.params.pooling_params import PoolingParams
from sidestep.ipc.params.sampling_params import RequestOutputKind, SamplingParams

NO_TEXT = SamplingParams(
    max_tokens=1, temperature=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
)
"""Sampling parameters that stand for a request that samples nothing."""


class AsyncPooling(ABC):
    """The calls of an engine with runner='pooling'."""

    _config: EngineConfig

    @property
    def pooling(self) -> PoolingSpec | None:
        """The vectors that the engine makes; None for an engine that generates text."""
        return self._config.spec.pooling

    @takes_vllm_arguments
    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | Mapping[str, Any] | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        num_public_tokens: int = 0,
        deadline_s: float | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Yield the vector of a prompt, which is the request's only output.

        `generate` describes the other arguments and the errors. Raises RequestError for a request
        that was aborted, or whose deadline has passed.
        """
        params = as_pooling_params(pooling_params)
        state = await self.start_pooling(
            prompt,
            params,
            request_id,
            priority=priority,
            cache_salt=cache_salt,
            num_public_tokens=num_public_tokens,
            deadline_s=deadline_s,
        )
        try:
            yield self.pooled(await state.next_output(), state, params)
        finally:
            self.leave(state)

    async def start_pooling(
        self, prompt: Prompt, params: PoolingParams, request_id: str | None = None, **options: Any
    ) -> RequestState:
        """Send a request for a vector, and return its state, which the caller must `leave`.

        options: the other arguments of `encode`, which also describes the errors.
        """
        check_task(self.pooling, pools=True)
        assert self.pooling is not None
        check_params(params, self.pooling)
        (state,) = await self.start(
            prompt, NO_TEXT, request_id, pooling=self.pooling.pooling, **options
        )
        return state

    def pooled(
        self, output: RequestOutput, state: RequestState, params: PoolingParams
    ) -> PoolingRequestOutput[PoolingOutput]:
        """Return the output of a request that has ended. Raises RequestError if it has no vector.

        output: what its state gave last.
        """
        assert self.pooling is not None
        return pooling_output(output, state.vector, params, self.pooling)

    @abstractmethod
    async def start(self, *arguments: Any, **options: Any) -> list[RequestState]:
        """Send a request; see AsyncLLM."""

    @abstractmethod
    def leave(self, *states: RequestState) -> None:
        """End requests that are no longer read; see AsyncLLM."""


def as_pooling_params(given: PoolingParams | Mapping[str, Any] | None) -> PoolingParams:
    """Return the parameters; `given` may be a dict of fields. Raises ValidationError."""
    if given is None:
        return PoolingParams()
    if isinstance(given, Mapping):
        return PoolingParams(**given)
    if not isinstance(given, PoolingParams):
        raise ValidationError(
            "pooling_params", f"must be PoolingParams, not {type(given).__name__}"
        )
    return given
