"""Modules and names that scripts import from vLLM and that do not exist here."""

from __future__ import annotations

from sidestep.ipc.vllm.foreign import NO_IMAGES, NO_LORA

_INSIDE = (
    "is part of vLLM's inside, which is not here; docs/architecture.md shows the parts of sidestep"
)
_NO_STEP = "there is no engine that a script steps; use LLM for batches or AsyncLLM for streams"
_NO_CONFIG = "options are given to EngineArgs, LLM(...) or AsyncLLM.from_engine_args"
_STRUCTURE = "use StructuredOutputsParams from sidestep.sampling_params"
_TOKENIZER = "LLM(...).get_tokenizer() gives a model's tokenizer; for others use transformers"

NAMES: dict[str, str] = {
    "LLMEngine": _NO_STEP,
    **dict.fromkeys(
        ("EmbeddingRequestOutput", "ClassificationRequestOutput", "ScoringRequestOutput"),
        "outputs of this kind have the type PoolingRequestOutput here, from sidestep.outputs",
    ),
    "GuidedDecodingParams": _STRUCTURE,
    "ModelRegistry": "a model family is a file in ipc/model/families and a line in "
    "ipc/common/registry.py; see docs/architecture.md",
    "initialize_ray_cluster": "each rank is a process on this host and needs no cluster",
    "LoRARequest": NO_LORA,
    "MultiModalDataDict": NO_IMAGES,
    "EmbedsPrompt": "prompts are text or token ids, not embeddings",
    "CompilationConfig": _NO_CONFIG,
    "VllmConfig": _NO_CONFIG,
    "EngineGenerateError": "a request that fails raises RequestError, from sidestep",
    "EngineCoreRequest": _INSIDE,
}
"""Names that vLLM's modules have and ours lack."""

MODULES: dict[str, str] = {
    "lora": NO_LORA,
    "multimodal": NO_IMAGES,
    "assets": NO_IMAGES,
    "config": _NO_CONFIG,
    "envs": "VLLM_ variables are not read; options are given to EngineArgs, LLM(...) or "
    "`sidestep serve`",
    "transformers_utils": _TOKENIZER,
    "tokenizers": _TOKENIZER,
    "beam_search": "use BeamSearchParams, BeamSearchOutput and BeamSearchSequence from sidestep",
    "engine.llm_engine": _NO_STEP,
    "engine.protocol": "AsyncLLM from sidestep is the one engine with an asyncio face",
    "engine.metrics": "AsyncLLM.get_stats() gives the figures, `sidestep serve` has /metrics",
    "v1": _INSIDE,
    "v1.engine.llm_engine": _NO_STEP,
    "v1.metrics": "AsyncLLM.get_stats() gives the figures, `sidestep serve` has /metrics",
    "entrypoints": "`sidestep serve` is the server; LLM and AsyncLLM are imported from sidestep",
    "utils.argparse_utils": "FlexibleArgumentParser is in sidestep.utils",
    "inputs": "TextPrompt, TokensPrompt and ChatPrompt are in sidestep.inputs",
    "version": "the version is sidestep.__version__",
    "distributed": "llm.shutdown(), or leaving `with LLM(...) as llm`, ends all processes and "
    "frees their memory",
    "usage": "no usage is reported to anyone",
    "plugins": "there are no plugins of vLLM's kind; see docs/architecture.md for how parts are "
    "added",
    "model_executor.models": NAMES["ModelRegistry"],
    "model_executor.guided_decoding": _STRUCTURE,
    "benchmarks": "`sidestep bench` measures",
    **dict.fromkeys(
        (
            "attention",
            "compilation",
            "core",
            "device_allocator",
            "forward_context",
            "model_executor",
            "platforms",
            "profiler",
            "reasoning",
            "ray",
            "scalar_type",
            "sequence",
            "third_party",
            "tool_parsers",
            "tracing",
            "triton_utils",
            "utils",
            "worker",
            "_custom_ops",
            "collect_env",
        ),
        _INSIDE,
    ),
}
"""Modules, by their names within the package. An entry also stands for the modules below it."""


def instead_of(name: str) -> str | None:
    """Return the replacement for a module or name of the package; None if vLLM has no such name."""
    last = name.rpartition(".")[2]
    if last in NAMES:
        return NAMES[last]
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return MODULES.get(name)
