"""Names to implementations: `name -> "module:attribute"`, imported only when it is loaded.

So a process can read a registry without importing what it names: the frontend checks that an
architecture is supported, and does not import torch. A new entry is one file and one line here.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from typing import Any, NamedTuple


class Family(NamedTuple):
    """Names the two parts that load the models of one architecture."""

    spec: str
    """Function that reads config.json, without torch."""
    model: str
    """Model class, which workers build."""


def _family(spec: str, model: str = "decoder:DecoderForCausalLM") -> Family:
    """Return the family of a "file:function" in ipc/model/families, or "moe.file:function".

    model: "file:class" in executor/models; the decoder that builds whatever the spec says, unless
    the family's checkpoints name or lay out their weights in another way.
    """
    return Family(f"sidestep.ipc.model.families.{spec}", f"sidestep.executor.models.{model}")


MODELS: dict[str, Family] = {
    "Ernie4_5ForCausalLM": _family("ernie4_5:ernie4_5"),
    "Exaone4ForCausalLM": _family("exaone4:exaone4"),
    "Gemma2ForCausalLM": _family("gemma.gemma2:gemma2"),
    "Gemma3ForCausalLM": _family("gemma.gemma3:gemma3"),
    "Gemma3ForConditionalGeneration": _family("gemma.gemma3:gemma3"),
    "Gemma4ForCausalLM": _family("moe.gemma4:gemma4"),
    "Gemma4ForConditionalGeneration": _family("moe.gemma4:gemma4"),
    "Gemma4UnifiedForCausalLM": _family("moe.gemma4:gemma4_unified"),
    "Gemma4UnifiedForConditionalGeneration": _family("moe.gemma4:gemma4_unified"),
    "Glm4ForCausalLM": _family("glm:glm4", "glm:GlmForCausalLM"),
    "Glm4MoeForCausalLM": _family("moe.glm4_moe:glm4_moe"),
    "GlmForCausalLM": _family("glm:glm", "glm:GlmForCausalLM"),
    "GptOssForCausalLM": _family("moe.gpt_oss:gpt_oss"),
    "GraniteForCausalLM": _family("granite:granite"),
    "LlamaForCausalLM": _family("llama:llama"),
    "Ministral3ForCausalLM": _family("mistral:ministral3"),
    "Mistral3ForConditionalGeneration": _family("mistral:mistral3"),
    "MistralForCausalLM": _family("mistral:mistral"),
    "MixtralForCausalLM": _family("moe.mixtral:mixtral"),
    "Olmo2ForCausalLM": _family("olmo:olmo2"),
    "Olmo3ForCausalLM": _family("olmo:olmo3"),
    "OlmoeForCausalLM": _family("moe.olmoe:olmoe"),
    "Phi3ForCausalLM": _family("phi3:phi3", "phi3:Phi3ForCausalLM"),
    "Qwen2ForCausalLM": _family("qwen2:qwen2"),
    "Qwen2MoeForCausalLM": _family("moe.qwen_moe:qwen2_moe"),
    "Qwen3ForCausalLM": _family("qwen3:qwen3"),
    "Qwen3MoeForCausalLM": _family("moe.qwen_moe:qwen3_moe"),
    "Qwen3NextForCausalLM": _family(
        "recurrent.qwen3_next:qwen3_next", "qwen3_next:Qwen3NextForCausalLM"
    ),
    "Qwen3_5ForCausalLM": _family("recurrent.qwen3_5:qwen3_5"),
    "Qwen3_5ForConditionalGeneration": _family("recurrent.qwen3_5:qwen3_5"),
    "Qwen3_5MoeForCausalLM": _family("recurrent.qwen3_5:qwen3_5_moe"),
    "Qwen3_5MoeForConditionalGeneration": _family("recurrent.qwen3_5:qwen3_5_moe"),
    "SeedOssForCausalLM": _family("seed_oss:seed_oss"),
    "SmolLM3ForCausalLM": _family("smollm3:smollm3"),
}
"""Hugging Face architecture name -> its family."""

_OUTSIDE_MODELS, _OUTSIDE_SPECS = "sidestep.models", "sidestep.model_specs"
"""Entry points by which installed packages add to the two registries above, in every process."""

RUNNERS: dict[str, str] = {
    "cpu": "sidestep.executor.cpu.cpu_runner:ModelRunner",
    "cuda": "sidestep.executor.gpu.gpu_runner:GpuRunner",
    "fake": "sidestep.executor.runner.fake:FakeRunner",
}
"""Device name -> what a worker process runs its steps on."""

EXECUTORS: dict[str, str] = {
    "multiproc": "sidestep.executor.hosts.multiproc:MultiprocExecutor",
}
"""Name -> how the core reaches its workers."""

RELAY = "sidestep.executor.hosts.relay:main"
"""The process that runs ranks of a replica on another host than the core's."""

TOKENIZER_CONVERTER = "sidestep.executor.processes.tokenizer_converter:main"
"""The process that converts a tokenizer to tokenizer.json, with transformers."""

ATTENTION_BACKENDS: dict[str, str] = {
    "flashinfer": "sidestep.executor.attention.flashinfer_backend:FlashInferAttention",
    "native": "sidestep.executor.attention.native_backend:NativeAttention",
    "torch": "sidestep.executor.attention.torch_backend:TorchAttention",
    "triton": "sidestep.executor.attention.triton_backend:TritonAttention",
}
"""Name -> implementation of paged attention."""


class Quantization(NamedTuple):
    """Names the two parts that read the matrices which one method has quantized."""

    spec: str
    """Function that reads what the model's files state, without torch."""
    files: str
    """Class that reads the matrices, in workers."""


def _quantization(spec: str, files: str) -> Quantization:
    """Return the method of a "file:function" and a "file:class"."""
    return Quantization(
        f"sidestep.ipc.model.quantization.{spec}", f"sidestep.executor.quantization.{files}"
    )


QUANTIZATIONS: dict[str, Quantization] = {
    "auto-round": _quantization("packed_ints:read_auto_round", "packed_files:GptqFiles"),
    "awq": _quantization("packed_ints:read_awq", "packed_files:AwqFiles"),
    "bitsandbytes": _quantization(
        "bitsandbytes:read_bitsandbytes", "bitsandbytes_files:BitsAndBytesFiles"
    ),
    "compressed-tensors": _quantization(
        "compressed_tensors:read_compressed_tensors",
        "compressed_tensors_files:CompressedTensorsFiles",
    ),
    "fbgemm_fp8": _quantization("fp8:read_fbgemm", "wide_files:WideFiles"),
    "fp8": _quantization("fp8:read_fp8", "wide_files:WideFiles"),
    "gguf": _quantization("gguf:read_gguf", "gguf_matrices:GgufMatrices"),
    "gptq": _quantization("packed_ints:read_gptq", "packed_files:GptqFiles"),
    "gptq_v2": _quantization("packed_ints:read_gptq", "packed_files:GptqV2Files"),
    "modelopt": _quantization("fp8:read_modelopt", "fp4_files:ModeloptFiles"),
}
"""Name of a method, as files state it -> what reads its matrices."""

PROPOSERS: dict[str, str] = {
    "ngram": "sidestep.executor.speculation.ngram:NgramProposer",
    "frequent": "sidestep.executor.speculation.frequent:FrequentProposer",
    "synthetic": "sidestep.executor.speculation.synthetic:SyntheticProposer",
}
"""Name -> what proposes drafts on the host, for speculation."""

POLICIES: dict[str, str] = {
    "fcfs": "sidestep.engine_core.scheduling.policies.fcfs:FcfsPolicy",
    "priority": "sidestep.engine_core.scheduling.policies.priority:PriorityPolicy",
}
"""Name -> scheduling policy, which orders requests and chooses who is preempted."""

ROUTERS: dict[str, str] = {
    "prefix": "sidestep.frontend.routing.prefix:PrefixRouter",
    "least_loaded": "sidestep.frontend.routing.least_loaded:LeastLoadedRouter",
    "round_robin": "sidestep.frontend.routing.round_robin:RoundRobinRouter",
}
"""Name -> router, which chooses the data-parallel replica that takes a request."""

PLACERS: dict[str, str] = {
    "join": "sidestep.frontend.placement.join:JoinPlacer",
    "local": "sidestep.frontend.placement.local:LocalPlacer",
    "ray": "sidestep.frontend.placement.on_ray.ray_placer:RayPlacer",
}
"""Name -> placer, which starts the cores of replicas, here or on other hosts."""

TOOL_PARSERS: dict[str, str] = {
    "hermes": "sidestep.frontend.parsers.hermes:HermesToolParser",
    "llama3_json": "sidestep.frontend.parsers.llama3_json:Llama3JsonToolParser",
    "mistral": "sidestep.frontend.parsers.mistral:MistralToolParser",
    "qwen3": "sidestep.frontend.parsers.hermes:HermesToolParser",
}
"""Name -> parser of the way in which a model writes tool calls."""

REASONING_PARSERS: dict[str, str] = {
    "deepseek_r1": "sidestep.frontend.parsers.think:DeepSeekR1ReasoningParser",
    "qwen3": "sidestep.frontend.parsers.think:Qwen3ReasoningParser",
}
"""Name -> parser of the way in which a model writes its reasoning."""


CLASSIFIER, _BARE, _GENERATOR = "ForSequenceClassification", "Model", "ForCausalLM"
"""Ends of the names of one family's architectures: with a head that classifies, without any head,
and with a head that generates text. They share the family's class and reader."""


def has_no_head(architecture: str) -> bool:
    """Return whether an architecture ends with the last layer's norm."""
    return architecture.endswith(_BARE)


def _entry(architecture: str, names: Collection[str]) -> str | None:
    """Return the name of an architecture, or of its family's generating one, if it is there."""
    for end in ("", CLASSIFIER, _BARE):
        if architecture.endswith(end):
            name = architecture.removesuffix(end) + _GENERATOR if end else architecture
            if name in names:
                return name
    return None


def model_class(architecture: str) -> str | None:
    """Return the target of an architecture's class for `load`.

    The class is from this project or an installed package.
    """
    name = _entry(architecture, MODELS)
    if name is not None:
        return MODELS[name].model
    outside = _outside(_OUTSIDE_MODELS)
    return outside.get(_entry(architecture, outside) or "")


def model_spec_reader(architecture: str) -> str:
    """Return the target of the function that reads an architecture's config.json.

    It is Llama's reader by default.
    """
    name = _entry(architecture, MODELS)
    if name is None:
        outside = _outside(_OUTSIDE_SPECS)
        name = _entry(architecture, outside)
        if name is not None:
            return outside[name]
    return MODELS[name or "LlamaForCausalLM"].spec


def model_names() -> list[str]:
    """Return the names of all architectures that can be loaded."""
    return sorted({*MODELS, *_outside(_OUTSIDE_MODELS)})


def _outside(group: str) -> dict[str, str]:
    """Return the entries that installed packages have registered, by name.

    It reads a file of each installed package.
    """
    from importlib import metadata  # slower to import than all else here, and rarely needed

    return {point.name: point.value for point in metadata.entry_points(group=group)}


def load(target: str) -> Any:
    """Import and return the object that "module:attribute" names."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)
