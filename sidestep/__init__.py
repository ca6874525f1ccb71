"""Sidestep: an LLM serving engine whose CPU work steps aside, always overlapped with the accelerator's steps.

Names are imported when they are first used, so `import sidestep` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sidestep.frontend.async_llm import AsyncLLM
    from sidestep.frontend.llm import LLM
    from sidestep.frontend.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        Logprob,
        RequestMetrics,
        RequestOutput,
    )
    from sidestep.frontend.scaling import BestOfN, Revision, Vote, best_of_n, critique_and_revise, self_consistency
    from sidestep.ipc.beam_search_params import BeamSearchParams
    from sidestep.ipc.config import DEFAULT_MODEL, EngineArgs
    from sidestep.ipc.errors import (
        EngineDeadError,
        EngineStalledError,
        EngineStartError,
        QueueFullError,
        RequestError,
        SidestepError,
        ValidationError,
    )
    from sidestep.ipc.records import RequestRecord, StepRecord
    from sidestep.ipc.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams
    from sidestep.ipc.structured_outputs import StructuredOutputsParams

__version__: str

_HOMES = {
    "AsyncLLM": "frontend.async_llm",
    "LLM": "frontend.llm",
    "BeamSearchOutput": "frontend.outputs",
    "BeamSearchSequence": "frontend.outputs",
    "CompletionOutput": "frontend.outputs",
    "Logprob": "frontend.outputs",
    "RequestMetrics": "frontend.outputs",
    "RequestOutput": "frontend.outputs",
    "BestOfN": "frontend.scaling",
    "Revision": "frontend.scaling",
    "Vote": "frontend.scaling",
    "best_of_n": "frontend.scaling",
    "critique_and_revise": "frontend.scaling",
    "self_consistency": "frontend.scaling",
    "BeamSearchParams": "ipc.beam_search_params",
    "DEFAULT_MODEL": "ipc.config",
    "EngineArgs": "ipc.config",
    "EngineDeadError": "ipc.errors",
    "EngineStalledError": "ipc.errors",
    "EngineStartError": "ipc.errors",
    "QueueFullError": "ipc.errors",
    "RequestError": "ipc.errors",
    "SidestepError": "ipc.errors",
    "ValidationError": "ipc.errors",
    "RequestRecord": "ipc.records",
    "StepRecord": "ipc.records",
    "RepetitionDetectionParams": "ipc.sampling_params",
    "RequestOutputKind": "ipc.sampling_params",
    "SamplingParams": "ipc.sampling_params",
    "StructuredOutputsParams": "ipc.structured_outputs",
}

__all__ = [
    "DEFAULT_MODEL", "LLM", "AsyncLLM", "BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence", "BestOfN",
    "CompletionOutput", "EngineArgs", "EngineDeadError", "EngineStalledError", "EngineStartError", "Logprob",
    "QueueFullError", "RepetitionDetectionParams", "RequestError", "RequestMetrics", "RequestOutput",
    "RequestOutputKind", "RequestRecord", "Revision", "SamplingParams", "SidestepError", "StepRecord",
    "StructuredOutputsParams", "ValidationError", "Vote", "best_of_n", "critique_and_revise", "self_consistency",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        globals()[name] = _installed_version()
        return globals()[name]
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'sidestep' has no attribute {name!r}")
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
        return "0+unknown"  # run from a copy of the source
