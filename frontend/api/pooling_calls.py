"""The part of LLM that makes vectors of prompts: embeddings, classes, scores and rewards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from sidestep.frontend.api.async_llm import AsyncLLM
from sidestep.frontend.api.async_pooling import as_pooling_params
from sidestep.frontend.api.batch import Bar, Progress, all_of, as_list_of_prompts
from sidestep.frontend.api.request_checks import check_task
from sidestep.frontend.api.scores import Scores
from sidestep.frontend.input.prompts import Prompt
from sidestep.frontend.output.pooling_outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    Output,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
)
from sidestep.frontend.vllm.vllm_names import takes_vllm_arguments
from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.model.pooling_spec import PoolingSpec
from sidestep.ipc.params.pooling_params import PoolingParams, PoolingTask

T = TypeVar("T")
OneParams = PoolingParams | Mapping[str, Any]
Params = OneParams | Iterable[OneParams] | None
"""Pooling parameters for all prompts, or one for each; each may be a dict of fields."""


class PoolingCalls(ABC):
    """The calls of an engine with runner='pooling'; each returns when all prompts are done."""

    _llm: AsyncLLM

    @takes_vllm_arguments
    def encode(
        self,
        prompts: Prompt | Iterable[Prompt],
        pooling_params: Params = None,
        use_tqdm: Bar = True,
        *,
        pooling_task: PoolingTask | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the vector of one prompt or many, as arrays of numpy.

        `pooling_params` hold for all prompts, or are a list with one for each. Raises
        ValidationError if `pooling_task` is not the model's task.
        """
        several, spec = as_list_of_prompts(prompts), self._spec()
        each = self._params(pooling_params, len(several))
        if pooling_task is not None:
            _check(spec, pooling_task, "pooling_task")
        self._check_awake()
        with Progress(len(several), use_tqdm) as progress:

            async def run(
                prompt: Prompt, params: PoolingParams
            ) -> PoolingRequestOutput[PoolingOutput]:
                async for output in self._llm.encode(prompt, params):
                    progress.add(len(output.prompt_token_ids), 0)
                return output

            work = [run(*one) for one in zip(several, each, strict=True)]
            return self._call(all_of(work))

    @takes_vllm_arguments
    def embed(
        self,
        prompts: Prompt | Iterable[Prompt],
        use_tqdm: Bar = True,
        *,
        pooling_params: Params = None,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """Return the embedding of one prompt or many; see `encode` for the arguments."""
        _check(self._spec(), "embed", "embed")
        found = self.encode(prompts, pooling_params, use_tqdm)
        return [_with(one, EmbeddingOutput(one.outputs.data.tolist())) for one in found]

    @takes_vllm_arguments
    def classify(
        self,
        prompts: Prompt | Iterable[Prompt],
        use_tqdm: Bar = True,
        *,
        pooling_params: Params = None,
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """Return the probabilities of the model's labels; see `encode` for the arguments."""
        _check(self._spec(), "classify", "classify")
        found = self.encode(prompts, pooling_params, use_tqdm)
        return [_with(one, ClassificationOutput(one.outputs.data.tolist())) for one in found]

    @takes_vllm_arguments
    def reward(
        self,
        prompts: Prompt | Iterable[Prompt],
        use_tqdm: Bar = True,
        *,
        pooling_params: Params = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the outputs of the model's head as they are, without a softmax or sigmoid.

        See `encode` for the arguments.
        """
        _check(self._spec(), "classify", "reward")
        several = as_list_of_prompts(prompts)
        each = [
            one.clone(use_activation=False) if one.activation is None else one
            for one in self._params(pooling_params, len(several))
        ]
        return self.encode(several, each, use_tqdm)

    @takes_vllm_arguments
    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        use_tqdm: Bar = True,
        *,
        pooling_params: OneParams | None = None,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """Return the score of each pair: one text with each of text_2, or texts side by side.

        A model with a head of one output reads each pair as one prompt. For a model that makes
        embeddings the score is their cosine.
        """
        scores = Scores(self._spec(), _texts("text_1", text_1), _texts("text_2", text_2))
        prompts = scores.prompts(self._llm.get_tokenizer())
        found = self.encode(prompts, pooling_params, use_tqdm)
        results = scores.of([one.outputs.data for one in found])
        of_pairs = found[-len(results) :]  # an embedding's output is that of its text_2
        return [_with(f, ScoringOutput(s)) for f, s in zip(of_pairs, results, strict=True)]

    def _spec(self) -> PoolingSpec:
        """Return the engine's vectors. Raises ValidationError if it generates text."""
        check_task(self._llm.pooling, pools=True)
        assert self._llm.pooling is not None
        return self._llm.pooling

    def _params(self, given: Params, count: int) -> list[PoolingParams]:
        if given is None or isinstance(given, PoolingParams | Mapping):
            return [as_pooling_params(given)] * count
        each = [as_pooling_params(one) for one in given]
        if len(each) != count:
            raise ValidationError("pooling_params", f"has {len(each)} entries for {count} prompts")
        return each

    @abstractmethod
    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop's thread; see LLM."""

    @abstractmethod
    def _check_awake(self) -> None:
        """Raise SidestepError while the engine sleeps."""


def _check(spec: PoolingSpec, task: PoolingTask, name: str) -> None:
    if spec.task != task:
        raise ValidationError(
            name, f"this model's task is {spec.task!r}, and {task!r} needs another model"
        )


def _with(
    found: PoolingRequestOutput[PoolingOutput], outputs: Output
) -> PoolingRequestOutput[Output]:
    """Return an output in another form."""
    return PoolingRequestOutput(
        found.request_id,
        outputs,
        found.prompt_token_ids,
        found.finished,
        found.metrics,
        found.num_cached_tokens,
    )


def _texts(name: str, given: str | Sequence[str]) -> list[str]:
    several = [given] if isinstance(given, str) else list(given)
    for one in several:
        if not isinstance(one, str):
            raise ValidationError(name, f"must be text or a list of texts, not {one!r}")
    return several
