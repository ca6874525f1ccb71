"""The sections of the engine's options: each option is declared, described and checked here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sidestep.ipc.common.fault_plan import check_faults
from sidestep.ipc.common.options import (
    Options,
    option,
    parse_bytes,
    parse_ints,
    parse_length,
    parse_mapping,
    require,
    require_positive,
)
from sidestep.ipc.common.registry import ATTENTION_BACKENDS, POLICIES
from sidestep.ipc.common.registry import QUANTIZATIONS as METHODS
from sidestep.ipc.model.generation_config import GenerationConfig, read_generation_config
from sidestep.ipc.model.kv.kv_cache_dtype import AUTO, KV_CACHE_DTYPES
from sidestep.ipc.model.layer_spec import LayerSpec
from sidestep.ipc.model.layer_split import Stage, split_layers, stage_of
from sidestep.ipc.model.model_spec import ModelSpec
from sidestep.ipc.model.pooling_spec import RUNNERS
from sidestep.ipc.model.quantization.online import HEAD_CHOICES, ONLINE
from sidestep.ipc.model.speculative_config import SpeculativeConfig
from sidestep.ipc.step_limits import StepLimits, default_limits

DEFAULT_MODEL = str(Path(__file__).parent.parent / "tiny-python")
"""Folder of the bundled model."""
DTYPES = ("auto", "bfloat16", "float16", "float32")
LOAD_FORMATS = ("auto", "safetensors", "pt", "dummy")
TOKENIZER_MODES = ("auto", "hf")
QUANTIZATIONS = tuple(sorted({*METHODS, *ONLINE}))
DEVICES = ("auto", "cpu", "cuda", "fake")


def _class_name(target: str) -> str:
    module, colon, name = target.partition(":")
    require(
        bool(module and colon and name.isidentifier()),
        "logits_processors",
        f"{target!r} is not of the form 'module:Class'",
    )
    return name


@dataclass(frozen=True)
class ModelConfig(Options):
    """The model, and how it is loaded."""

    model: str = option(
        DEFAULT_MODEL,
        "Folder in the Hugging Face layout, a GGUF file, or a hub name where a hub is reachable.",
    )
    tokenizer: str | None = option(
        None, "Folder or hub name of the tokenizer; the model's own if not given."
    )
    tokenizer_mode: str = option(
        "auto",
        "'auto' reads tokenizer.json; a tokenizer of another kind (SentencePiece, tiktoken and "
        "others) is converted once by transformers. 'hf' takes every tokenizer as transformers "
        "reads it.",
        choices=TOKENIZER_MODES,
    )
    revision: str | None = option(None, "Branch, tag or commit of a hub model.")
    runner: str = option(
        "auto",
        "Use of the model: 'generate' text, or 'pooling' for embeddings, scores and classes. "
        "'auto' pools with a model that has a classification head, no head, or a folder of "
        "sentence-transformers.",
        choices=RUNNERS,
    )
    pooler_config: dict[str, Any] | None = option(
        None,
        "With runner 'pooling': fields that replace the model's own, as JSON, such as "
        '\'{"pooling_type": "MEAN", "normalize": false}\'.',
        parse=parse_mapping,
    )
    dtype: str = option(
        "auto",
        "Type of weights and activations; 'auto' is the checkpoint's on a GPU, and float32 on a "
        "CPU.",
        choices=DTYPES,
    )
    max_model_len: int | str | None = option(
        None,
        "Longest prompt plus output in tokens: a number or '32k', which must fit in the KV "
        "cache. Default, and 'auto': the most that the model and the KV cache allow.",
        parse=parse_length,
    )
    quantization: str | None = option(
        None,
        "Form of the matrices of products. Quantized files are recognised by themselves; for plain "
        "ones, 'fp8', 'int8' or 'int4' quantizes each matrix while it is loaded.",
        choices=QUANTIZATIONS,
    )
    head_quantization: str = option(
        "auto",
        "Form of the output head where the files have it plain: 'fp8' or 'int8' rounds it while it "
        "is loaded, 'none' keeps it. 'auto' rounds it where --quantization rounds the other "
        "matrices: to fp8 with fp8, else to int8.",
        choices=HEAD_CHOICES,
    )
    load_format: str = option(
        "auto",
        "Files that weights are read from: 'auto' takes safetensors where the folder has them, "
        "else pytorch_model.bin ('pt'). 'dummy' gives random weights without reading any.",
        choices=LOAD_FORMATS,
    )
    dummy_seed: int = option(0, "Seed of the weights that load_format 'dummy' makes.")
    hf_overrides: dict[str, Any] | None = option(
        None,
        "Fields that replace those of the model's config.json, as JSON, such as "
        '\'{"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}\'; objects are merged field '
        "by field.",
        parse=parse_mapping,
    )
    generation_config: str = option(
        "auto",
        "Source of the sampling parameters that requests leave out: 'auto' from the model's "
        "generation_config.json; 'vllm' or 'none' are the engine's own; or a folder with such a "
        "file.",
    )
    chat_template: str | None = option(
        None,
        "File with a chat template (Jinja), or the template itself, instead of the model's own.",
    )
    skip_tokenizer_init: bool = option(
        False,
        "Load no tokenizer: prompts and outputs are token ids, and requests that need text "
        "are refused.",
    )
    logits_processors: list[str] | None = option(
        None, "Class that changes logits, as 'module:Class'; requests reach it by extra_args."
    )

    def read_generation_config(self, path: str) -> GenerationConfig:
        """Return the settings for generating with the model in this folder.

        Raises EngineStartError.
        """
        if self.generation_config == "auto":
            return read_generation_config(path)
        if self.generation_config in ("vllm", "none"):
            return read_generation_config(path, with_sampling=False)
        return read_generation_config(self.generation_config, required=True)

    @property
    def processor_names(self) -> list[str]:
        """Names by which requests address the logits processors."""
        return [_class_name(target) for target in self.logits_processors or ()]

    def __post_init__(self) -> None:
        super().__post_init__()
        names = self.processor_names
        require(
            len(set(names)) == len(names), "logits_processors", "two classes have the same name"
        )
        if not isinstance(self.max_model_len, str):
            require_positive(self, "max_model_len")
        require(
            bool(self.generation_config),
            "generation_config",
            "must be 'auto', 'vllm', 'none' or a folder",
        )
        require(
            not self.skip_tokenizer_init or self.tokenizer is None,
            "tokenizer",
            "is not loaded with skip_tokenizer_init; give only one of the two",
        )
        require(
            not self.skip_tokenizer_init or self.chat_template is None,
            "chat_template",
            "needs a tokenizer, which skip_tokenizer_init leaves out; give only one of the two",
        )


@dataclass(frozen=True)
class CacheConfig(Options):
    """The paged KV cache."""

    block_size: int | None = option(
        None,
        "Tokens in one KV block. Default: 64 on a GPU, where it must be a multiple of 16; else 16.",
    )
    num_kv_blocks: int | None = option(
        None, "Number of KV blocks; overrides what memory would allow."
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "Memory for the KV cache of one rank, such as 4G. Default: what --gpu-memory-utilization "
        "leaves on a GPU, at most 2G on a CPU.",
        parse=parse_bytes,
    )
    gpu_memory_utilization: float = option(
        0.92, "Share of a GPU's memory for weights, activations and KV cache."
    )
    enable_prefix_caching: bool = option(True, "Reuse KV blocks of equal prefixes.")
    kv_cache_dtype: str = option(
        AUTO,
        "How keys and values are kept: 'model' in the model's type; fp8 (e4m3), int8 or "
        "int4_per_token_head with a scale for each token and head. fp8 (or fp8_e4m3) takes the "
        "checkpoint's scales where it has some, fp8_per_token_head never; int8_per_token_head "
        "means int8. 'auto' means fp8 if the model's files ask for it, and else 'model'.",
        choices=tuple(KV_CACHE_DTYPES),
    )
    kv_cache_dtype_skip_layers: list[str] | None = option(
        None,
        "Layers that keep keys and values in the model's type: their indices, and 'sliding_window' "
        "for all layers with a window.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "block_size", "num_kv_blocks", "kv_cache_memory_bytes")
        require(0 < self.gpu_memory_utilization <= 1, "gpu_memory_utilization", "must be in (0, 1]")


_GPU_TARGET_ITL_MS = 27.0
"""Default target_itl_ms on a GPU, in milliseconds."""


@dataclass(frozen=True)
class SchedulerConfig(Options):
    """The size of a step, and the order of requests."""

    max_num_seqs: int | None = option(
        None, "Most requests that run at once. Default: 512 on a GPU, else 256."
    )
    max_num_batched_tokens: int | None = option(
        None,
        "Token budget of one step; longer prompts are computed in chunks. Default: 8448 on a GPU, "
        "16896 there for a model with experts, else 2048.",
    )
    scheduling_policy: str = option(
        "fcfs",
        "Order of waiting requests; 'priority' takes the lowest number first.",
        choices=tuple(POLICIES),
    )
    async_scheduling: bool = option(True, "Schedule step N+1 while step N runs.")
    target_itl_ms: float | None = option(
        None,
        "Milliseconds that a step, and with it the gap between two tokens, should last at most "
        "while other requests decode: prompts are then computed in smaller chunks, unless more "
        "prompts wait than one step can take; 0: chunks as large as fit. Default: 27 on a GPU, "
        "else 0.",
    )

    speculative_config: dict[str, Any] | None = option(
        None,
        "Draft tokens that the model then verifies, several in a step: a JSON object such as "
        '{"method": "ngram", "num_speculative_tokens": 4}. Outputs stay the same.',
        parse=parse_mapping,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        SpeculativeConfig.of(self.speculative_config)  # raises for wrong values
        target = self.target_itl_ms
        require(
            target is None or 0 <= target < float("inf"),
            "target_itl_ms",
            f"must be 0 or more, not {target}",
        )
        require_positive(self, "max_num_seqs", "max_num_batched_tokens")
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        require(
            seqs is None or tokens is None or tokens >= seqs,
            "max_num_batched_tokens",
            f"{tokens} is less than max_num_seqs ({seqs}): a decode step of all running requests "
            "would not fit; raise it or lower max_num_seqs",
        )

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """The proposer and the number of its drafts; None without speculation."""
        return SpeculativeConfig.of(self.speculative_config)

    def limits(
        self, device: str, num_stages: int = 1, layers: Sequence[LayerSpec] = ()
    ) -> StepLimits:
        """Return the given values, filled up with the defaults of a device and of a model's layers.

        device: 'cuda', 'cpu' or 'fake'. A default is lowered or raised to fit a limit that was
        given: a decode step of all running requests fits in any case.
        """
        most_seqs, most_tokens = default_limits(device, layers)
        seqs = self.max_num_seqs or min(most_seqs, self.max_num_batched_tokens or most_seqs)
        tokens = self.max_num_batched_tokens or max(most_tokens, seqs)
        target = (
            self.target_itl_ms
            if self.target_itl_ms is not None
            else _GPU_TARGET_ITL_MS * (device == "cuda")
        )
        steps = num_stages + self.async_scheduling
        # A slot is reused only after the last step that touches it has come back, so with overlap a
        # full batch may end while another full batch enters.
        return StepLimits(
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            num_slots=seqs * steps,
            target_itl_s=target / 1e3 / num_stages,
            num_stages=num_stages,
            max_steps_in_flight=steps,
            num_drafts=0 if self.speculation is None else self.speculation.num_speculative_tokens,
        )


@dataclass(frozen=True)
class ParallelConfig(Options):
    """Devices, ranks and replicas."""

    tensor_parallel_size: int = option(
        1, "Number of ranks that share each layer; one process each."
    )
    pipeline_parallel_size: int = option(
        1, "Number of stages that the layers are divided into, each of tensor_parallel_size ranks."
    )
    pipeline_layers: tuple[int, ...] | None = option(
        None,
        "Number of layers of each stage, such as 17,15. Default: numbers for which all stages "
        "take about equally long; the last stage also has the output head.",
        parse=parse_ints,
    )
    data_parallel_size: int = option(
        1,
        "Number of replicas of the model, each with its own cache, GPUs and processes; requests "
        "are spread over them.",
    )
    max_replicas: int | None = option(
        None,
        "Most replicas: the engine begins with data_parallel_size of them, adds others while "
        "requests wait, and ends those that it does not need. Default: their number stays.",
    )
    enable_expert_parallel: bool = option(
        False,
        "Each of the tensor_parallel_size ranks has some whole experts of a layer, instead of a "
        "part of each; attention is divided by heads as ever.",
    )
    device: str = option(
        "auto",
        "'auto' takes the GPU where there is one; 'fake' scripts tokens without a model.",
        choices=DEVICES,
    )
    cpu_threads: int | None = option(
        None,
        "Threads of a CPU rank. Default: the cores, shared among all ranks of all replicas, but "
        "at most one for each 256 values of a hidden state.",
    )
    attention_backend: str = option(
        "auto",
        "How attention is computed: 'auto' takes triton on a GPU; on a CPU it takes native, which "
        "needs a C compiler (gcc), else torch. flashinfer needs its package.",
        choices=("auto", *ATTENTION_BACKENDS),
    )
    enforce_eager: bool = option(
        False,
        "Launch each kernel by itself instead of whole steps: CUDA graphs, or tapes on a CPU.",
    )
    disable_custom_all_reduce: bool = option(
        False,
        "Ranks on GPUs sum through torch.distributed (NCCL) alone, not through one another's "
        "memory.",
    )
    fake_step_ms: float = option(
        0.0,
        "Device 'fake' only: how long a step keeps the device, or each stage, busy, in "
        "milliseconds.",
    )
    fake_faults: dict[str, Any] | None = option(
        None,
        "Device 'fake' only: a fault plan, as JSON: deaths and other faults that tests want.",
        parse=parse_mapping,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(
            self,
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "data_parallel_size",
            "max_replicas",
            "cpu_threads",
        )
        require(
            self.most_replicas >= self.data_parallel_size,
            "max_replicas",
            f"{self.max_replicas} is less than data_parallel_size ({self.data_parallel_size}), "
            "the number at the start",
        )
        if (layers := self.pipeline_layers) is not None:
            require(
                len(layers) == self.pipeline_parallel_size,
                "pipeline_layers",
                f"has {len(layers)} numbers, one is wanted for each of "
                f"{self.pipeline_parallel_size} stages (pipeline_parallel_size)",
            )
            require(
                min(layers) >= 1, "pipeline_layers", f"each stage needs a layer, not {min(layers)}"
            )
        require(self.fake_step_ms >= 0, "fake_step_ms", "must not be negative")
        require(
            self.fake_step_ms == 0 or self.device == "fake",
            "fake_step_ms",
            f"has a meaning only with device 'fake', not {self.device!r}",
        )
        check_faults(self.fake_faults, self.device)

    @property
    def most_replicas(self) -> int:
        """Number of replicas that may serve at once."""
        return self.data_parallel_size if self.max_replicas is None else self.max_replicas

    @property
    def num_ranks(self) -> int:
        """Processes of the model, or of each replica.

        The ranks of one stage come one after the other.
        """
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def rank_name(self, rank: int) -> str:
        """Return a rank's name for users, such as 'worker 3 (stage 1, tp rank 1)'.

        The parts in parentheses are left out as far as there is one stage, or one rank a stage.
        """
        "several."
        tp, pp = self.tensor_parallel_size, self.pipeline_parallel_size
        parts = [f"stage {rank // tp}"] * (pp > 1) + [f"tp rank {rank % tp}"] * (tp > 1)
        return f"worker {rank} ({', '.join(parts)})" if parts else f"worker {rank}"

    def stage(self, spec: ModelSpec, rank: int) -> Stage:
        """Return the part of the model that a rank has."""
        layers = self.pipeline_layers or split_layers(spec, self.pipeline_parallel_size)
        return stage_of(tuple(layers), rank // self.tensor_parallel_size)
