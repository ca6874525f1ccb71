"""Sidestep: an LLM serving engine whose CPU work always overlaps the accelerator's steps.

Names are imported when they are first used, so `import sidestep` costs nothing.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from sidestep.engine.arg_utils import AsyncEngineArgs
    from sidestep.engine.async_llm_engine import AsyncLLMEngine
    from sidestep.frontend.api.async_llm import AsyncLLM
    from sidestep.frontend.api.llm import LLM
    from sidestep.frontend.api.scaling import (
        BestOfN,
        Revision,
        Vote,
        best_of_n,
        critique_and_revise,
        self_consistency,
    )
    from sidestep.frontend.input.prompts import ChatPrompt, TextPrompt, TokensPrompt
    from sidestep.frontend.options.engine_args import EngineArgs
    from sidestep.frontend.output.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        Logprob,
        RequestMetrics,
        RequestOutput,
    )
    from sidestep.frontend.output.pooling_outputs import (
        ClassificationOutput,
        EmbeddingOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringOutput,
    )
    from sidestep.inputs import PromptType
    from sidestep.ipc.common.errors import (
        EngineDeadError,
        EngineStalledError,
        EngineStartError,
        QueueFullError,
        RequestError,
        SidestepError,
        UnknownNameError,
        UnsupportedError,
        ValidationError,
        WorkerCallError,
    )
    from sidestep.ipc.config_sections import DEFAULT_MODEL
    from sidestep.ipc.params.beam_search_params import BeamSearchParams
    from sidestep.ipc.params.pooling_params import PoolingParams
    from sidestep.ipc.params.sampling_params import (
        RepetitionDetectionParams,
        RequestOutputKind,
        SamplingParams,
    )
    from sidestep.ipc.params.structured_outputs_params import StructuredOutputsParams
    from sidestep.ipc.transport.records import RequestRecord, StepRecord

__version__: str

_HOMES = {
    "AsyncEngineArgs": "engine.arg_utils",
    "AsyncLLMEngine": "engine.async_llm_engine",
    "PromptType": "inputs",
    "AsyncLLM": "frontend.api.async_llm",
    "LLM": "frontend.api.llm",
    "BeamSearchOutput": "frontend.output.outputs",
    "BeamSearchSequence": "frontend.output.outputs",
    "CompletionOutput": "frontend.output.outputs",
    "Logprob": "frontend.output.outputs",
    "RequestMetrics": "frontend.output.outputs",
    "RequestOutput": "frontend.output.outputs",
    "ClassificationOutput": "frontend.output.pooling_outputs",
    "EmbeddingOutput": "frontend.output.pooling_outputs",
    "PoolingOutput": "frontend.output.pooling_outputs",
    "PoolingRequestOutput": "frontend.output.pooling_outputs",
    "ScoringOutput": "frontend.output.pooling_outputs",
    "ChatPrompt": "frontend.input.prompts",
    "TextPrompt": "frontend.input.prompts",
    "TokensPrompt": "frontend.input.prompts",
    "BestOfN": "frontend.api.scaling",
    "Revision": "frontend.api.scaling",
    "Vote": "frontend.api.scaling",
    "best_of_n": "frontend.api.scaling",
    "critique_and_revise": "frontend.api.scaling",
    "self_consistency": "frontend.api.scaling",
    "BeamSearchParams": "ipc.params.beam_search_params",
    "DEFAULT_MODEL": "ipc.config_sections",
    "EngineArgs": "frontend.options.engine_args",
    "EngineDeadError": "ipc.common.errors",
    "EngineStalledError": "ipc.common.errors",
    "EngineStartError": "ipc.common.errors",
    "QueueFullError": "ipc.common.errors",
    "RequestError": "ipc.common.errors",
    "SidestepError": "ipc.common.errors",
    "UnknownNameError": "ipc.common.errors",
    "UnsupportedError": "ipc.common.errors",
    "ValidationError": "ipc.common.errors",
    "WorkerCallError": "ipc.common.errors",
    "RequestRecord": "ipc.transport.records",
    "StepRecord": "ipc.transport.records",
    "PoolingParams": "ipc.params.pooling_params",
    "RepetitionDetectionParams": "ipc.params.sampling_params",
    "RequestOutputKind": "ipc.params.sampling_params",
    "SamplingParams": "ipc.params.sampling_params",
    "StructuredOutputsParams": "ipc.params.structured_outputs_params",
}

__all__ = [
    "DEFAULT_MODEL",
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "BestOfN",
    "ChatPrompt",
    "ClassificationOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EngineArgs",
    "EngineDeadError",
    "EngineStalledError",
    "EngineStartError",
    "Logprob",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "QueueFullError",
    "RepetitionDetectionParams",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "RequestRecord",
    "Revision",
    "SamplingParams",
    "ScoringOutput",
    "SidestepError",
    "StepRecord",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "UnknownNameError",
    "UnsupportedError",
    "ValidationError",
    "WorkerCallError",
    "Vote",
    "best_of_n",
    "critique_and_revise",
    "self_consistency",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        globals()[name] = _installed_version()
        return globals()[name]
    home = _HOMES.get(name)
    if home is None:
        instead = _instead_of(name)
        raise AttributeError(
            f"module 'sidestep' has no attribute {name!r}" + (f": {instead}" if instead else "")
        )
    value = getattr(importlib.import_module(f"sidestep.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, "__version__"})


def _installed_version() -> str:
    from importlib import metadata  # takes longer than the rest of this import

    try:
        return metadata.version("sidestep")
    except metadata.PackageNotFoundError:
        return "0+unknown"  # this is a copy of the source that is not installed


def _instead_of(name: str) -> str | None:
    from sidestep.ipc.vllm.imports import instead_of  # costs time only if a name is missing

    return instead_of(name)


class _MissingModules:
    """Import finder whose errors name the replacement for a module of vLLM's that is missing here.

    Python asks this finder last. `from sidestep import X` asks it too, when the package has no X.
    This class does not inherit from importlib.abc.MetaPathFinder: every process of an engine would
    import that module, which takes 15 ms.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        """Raise ModuleNotFoundError for a name that vLLM has and sidestep lacks."""
        package, _, name = fullname.partition(".")
        if package == "sidestep" and name and (instead := _instead_of(name)) is not None:
            # The error has no `name=`: the import system ignores an error that names X of `from ...
            # import X`.
            raise ModuleNotFoundError(f"{fullname}: {instead}")
        return None


sys.meta_path.append(_MissingModules())
