"""From WorkerArgs to a model on a device: choice of device and type, and loading of weights."""

from __future__ import annotations

import logging

import msgspec
import torch

from sidestep.executor.attention.base import AttentionBackend
from sidestep.executor.attention.rotary import RotaryTable
from sidestep.executor.layers.experts.packed_experts import unpack_experts
from sidestep.executor.layers.experts.separate_experts import experts_elsewhere
from sidestep.executor.models.decoder import (
    DecoderForCausalLM,
    distinct_ropes,
    layers_of,
    weights_elsewhere,
)
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.quantization.quantized_files import (
    CheckpointMatrices,
    made_matrices,
    matrices_of,
)
from sidestep.executor.runner.runner import WorkerArgs
from sidestep.executor.weights.checkpoints import open_checkpoint
from sidestep.executor.weights.weight_loader import (
    CheckpointWeights,
    DummyWeights,
    NoWeights,
    Weights,
)
from sidestep.ipc.common import registry
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.model.cache_sizes import CPU_BLOCK_SIZE
from sidestep.ipc.model.layer_spec import ExpertsSpec, attention_of
from sidestep.ipc.model.layer_split import Stage
from sidestep.ipc.model.model_spec import ModelSpec

logger = logging.getLogger(__name__)

HEAD_MATRIX = "lm_head"
EMBEDDING, HEAD = "model.embed_tokens.weight", f"{HEAD_MATRIX}.weight"
"""Checkpoint names of the embedding's weight and of the head's."""
BODY = "model."
"""Beginning of the names of all weights but the head's."""
MULTIMODAL = "ForConditionalGeneration"
"""End of the names of architectures whose language model is one part of them."""
_TEXT_PARTS = {
    "language_model.model.": BODY,
    "model.language_model.": BODY,
    "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
}
"""Beginnings of the language model's names in such a checkpoint, older and newer ones, and what
they are in a checkpoint of the language model alone."""


def pick_device(args: WorkerArgs) -> torch.device:
    """Return the GPU of this rank, or the CPU.

    Raises EngineStartError where a GPU is asked for and there is none.
    """
    wanted = args.parallel.device
    have = torch.cuda.device_count() if wanted in ("auto", "cuda") else 0
    if wanted == "cpu" or (wanted == "auto" and have == 0):
        return torch.device("cpu")
    ranks, replicas = args.parallel.num_ranks, args.parallel.most_replicas
    if have < ranks * replicas:
        many = f"{replicas} replicas of {ranks} ranks" if replicas > 1 else f"{ranks} ranks"
        field = "data" if replicas > 1 else "pipeline" if args.stage.count > 1 else "tensor"
        raise EngineStartError(
            f"{field}_parallel_size: {many} need as many GPUs, torch sees {have}; use device 'cpu' "
            "or fewer of them"
        )
    return torch.device("cuda", args.gpu_index)


def pick_dtype(args: WorkerArgs, device: torch.device) -> torch.dtype:
    """Return the type that was asked for.

    The default is the checkpoint's type on a GPU, and float32 on a CPU.
    """
    if args.model.dtype != "auto":
        return getattr(torch, args.model.dtype)
    return torch.float32 if device.type == "cpu" else getattr(torch, args.spec.dtype)


def pick_attention(args: WorkerArgs, device: torch.device) -> type[AttentionBackend]:
    """Return the backend that was asked for, or the fastest that can run here.

    Raises EngineStartError if it cannot run there.
    """
    asked, problem = args.parallel.attention_backend, None
    defaults = ("native", "torch") if device.type == "cpu" else ("triton",)
    for name in defaults if asked == "auto" else (asked,):
        backend: type[AttentionBackend] = registry.load(registry.ATTENTION_BACKENDS[name])
        problem = _problem(name, backend, args, device)
        if problem is None:
            return backend
    raise EngineStartError(problem)


def _problem(
    name: str, backend: type[AttentionBackend], args: WorkerArgs, device: torch.device
) -> str | None:
    """Return why an attention backend cannot run here."""
    mixers = attention_of(args.spec.layers)
    formats = {mixer.kv_format for mixer in mixers} - {"model"}
    if formats and not backend.keeps_codes:
        return (
            f"kv_cache_dtype: attention_backend {name!r} keeps keys and values in the model's type "
            f"('model'), not as {formats.pop()}; change one of the two"
        )
    head_dims = {mixer.head_dim for mixer in mixers}
    block_size = args.cache.block_size or CPU_BLOCK_SIZE
    reason = backend.missing(device) or backend.refuses(
        pick_dtype(args, device), head_dims, block_size
    )
    return None if reason is None else f"attention_backend: {name!r} cannot run here: {reason}"


def load_model(
    args: WorkerArgs, parallel: Parallel, dtype: torch.dtype, device: torch.device
) -> DecoderForCausalLM:
    """Return this rank's part of the model, with its weights.

    Raises EngineStartError naming what is wrong with the weights.
    """
    spec, stage = args.spec, args.stage
    build = model_class(spec.architecture)
    made: Weights | None = None
    if device.type == "meta":
        made = NoWeights(dtype, device)
    elif args.model.load_format == "dummy":
        made = DummyWeights(args.model.dummy_seed, dtype, device)
    if made is not None:
        made.matrices = made_matrices(spec.quantization)
        return build(spec, made, parallel, stage)
    with open_checkpoint(spec.path, args.model.load_format, dtype, device) as weights:
        weights.matrices = matrices_of(spec.quantization)
        if spec.pooling is not None and EMBEDDING.removeprefix(BODY) in weights:
            weights.rename(lambda name: f"{BODY}{name}")
        if spec.architecture.endswith(MULTIMODAL):
            weights.rename(text_name)
        find_experts(weights, spec, stage, parallel)
        if spec.tie_word_embeddings:
            spec = tie_as_found(spec, weights, stage, tells=args.rank_in_stage == 0)
        model: DecoderForCausalLM = build(spec, weights, parallel, stage)
        weights.ignore(*weights_elsewhere(spec, stage), *spec.unused_weights)
        weights.finish()
    return model


def model_class(architecture: str) -> type[DecoderForCausalLM]:
    """Return the class of an architecture, from this project or from an installed package.

    Raises EngineStartError where this process cannot import it.
    """
    target = registry.model_class(architecture)
    try:
        found: type[DecoderForCausalLM] = registry.load(target or "")
    except (ImportError, AttributeError, ValueError) as error:
        raise EngineStartError(
            f"model: {target!r}, the class of {architecture}, cannot be imported "
            f"by a worker: {error}"
        ) from None
    return found


def find_experts(
    weights: CheckpointWeights, spec: ModelSpec, stage: Stage, parallel: Parallel
) -> None:
    """Unpack the experts of a stage's layers, and leave those to other ranks that they have."""
    for index, layer in zip(stage.layers, layers_of(spec, stage), strict=True):
        if isinstance(layer.mlp, ExpertsSpec) and layer.mlp.stored == "apart":
            name = f"{BODY}layers.{index}"
            unpack_experts(weights, name, layer.mlp, spec.hidden_size)
            own = layer.mlp.names.place(name)
            weights.ignore(*experts_elsewhere(layer.mlp, own, parallel))


def text_name(name: str) -> str | None:
    """Return the name that a tensor has in the language model alone; None for other parts."""
    for beginning, own in _TEXT_PARTS.items():
        if name.startswith(beginning):
            return own + name.removeprefix(beginning)
    return None


def tie_as_found(
    spec: ModelSpec, weights: CheckpointWeights, stage: Stage, *, tells: bool
) -> ModelSpec:
    """Return the spec of a model with a tied head, changed to fit the checkpoint.

    As in transformers: a head that differs from the embedding is used, as a quantized one does; a
    head that equals the embedding is not; and a head alone is used as both. tells: whether this
    rank writes the message to the user.
    """
    matrices = weights.matrices
    is_coded = isinstance(matrices, CheckpointMatrices) and matrices.has(weights, HEAD_MATRIX)
    if HEAD not in weights and not is_coded:
        return spec
    if EMBEDDING not in weights:
        weights.alias(EMBEDDING, HEAD)
    elif stage.is_last and (is_coded or not weights.are_equal(EMBEDDING, HEAD)):
        if tells:
            logger.warning(
                "the checkpoint has an lm_head that differs from the embedding, so the "
                "two are not tied as config.json says (tie_word_embeddings)"
            )
        return msgspec.structs.replace(spec, tie_word_embeddings=False)
    weights.ignore(f"{HEAD_MATRIX}.")
    return spec


def load_rotary(args: WorkerArgs, device: torch.device) -> list[RotaryTable]:
    """Return cos and sin of every position that a request may reach, for each embedding once."""
    mixers = attention_of(layers_of(args.spec, args.stage))
    return [
        RotaryTable(rope, head_dim, args.max_model_len, device)
        for rope, head_dim in distinct_ropes(mixers)
    ]
