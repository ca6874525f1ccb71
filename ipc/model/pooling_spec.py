"""The vectors of an engine with runner='pooling', as the model's folder and the options say.

A model's states become one vector a prompt: an embedding, or the input of a head that classifies.
The folder says which: the architecture in config.json, and the files that sentence-transformers
writes beside it. A setting that would change the vector and is not implemented is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from sidestep.ipc.common.errors import EngineStartError, ValidationError
from sidestep.ipc.common.registry import CLASSIFIER, has_no_head
from sidestep.ipc.model.hf_config import HfConfig, read_json
from sidestep.ipc.params.pooling_params import POOLING_TYPES, PoolingTask, PoolingType

Activation = Literal["normalize", "softmax", "sigmoid", "none"]
"""Name of a function that makes a result of a pooled vector."""
RUNNERS = ("auto", "generate", "pooling")
"""Values of the option runner."""


class PoolingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The vectors of an engine that pools."""

    task: PoolingTask
    pooling: PoolingType
    width: int
    """Values of a vector: the hidden size, or the outputs of the head."""
    activation: Activation
    """Function that makes the result of a vector, where a request does not say otherwise."""
    labels: tuple[str, ...] = ()
    """Names of the head's outputs; empty for embeddings."""
    head_tokens: tuple[str, ...] = ()
    """Tokens "no" and "yes" whose rows of the language model's head make the head.

    Empty for a head with weights of its own.
    """
    head_token_ids: tuple[int, ...] = ()
    """Ids of `head_tokens`."""
    is_matryoshka: bool = False
    """Whether the first values of an embedding are an embedding too."""
    dimensions: tuple[int, ...] = ()
    """Lengths of embeddings that the model is trained for; empty for all lengths."""

    @property
    def has_head(self) -> bool:
        """Whether a head follows the pooled state."""
        return self.task == "classify"

    @property
    def reads_whole_prompt(self) -> bool:
        """Whether states before the last token count, which the prefix cache does not keep."""
        return self.pooling != "last"


def read_pooling(
    config: HfConfig, runner: str = "auto", pooler: Mapping[str, Any] | None = None
) -> PoolingSpec | None:
    """Return what the model makes of prompts; None if it generates text.

    runner: the option of this name. pooler: the option pooler_config. Raises EngineStartError for a
    model that cannot do it, and ValidationError for a wrong option.
    """
    modules = _modules(Path(config.path))
    has_head = config.architecture.endswith(CLASSIFIER)
    cannot_generate = has_head or has_no_head(config.architecture)
    if runner == "generate" and cannot_generate:
        raise ValidationError(
            "runner",
            f"{config.architecture} has no head that generates text; use 'pooling' or 'auto'",
        )
    if runner == "generate" or (runner == "auto" and not cannot_generate and modules is None):
        if pooler:
            raise ValidationError("pooler_config", "has a meaning only with runner 'pooling'")
        return None
    chosen = _pooler_options(pooler or {})
    if has_head:
        return _classifier(config, chosen)
    pooling, normalize = _of_modules(Path(config.path), modules)
    lengths = config.get("matryoshka_dimensions") or ()
    if not isinstance(lengths, list | tuple) or not all(type(n) is int and n > 0 for n in lengths):
        config.refuse("matryoshka_dimensions", f"must be a list of lengths, not {lengths!r}")
    normalize = chosen.get("normalize", normalize)
    return PoolingSpec(
        task="embed",
        pooling=chosen.get("pooling", pooling),
        width=config.whole("hidden_size"),
        activation="normalize" if normalize else "none",
        is_matryoshka=config.flag("is_matryoshka") or bool(lengths),
        dimensions=tuple(lengths),
    )


def _classifier(config: HfConfig, chosen: Mapping[str, Any]) -> PoolingSpec:
    tokens = config.names("classifier_from_token")
    original = config.flag("is_original_qwen3_reranker")
    if bool(tokens) != original or len(tokens) not in (0, 2):
        config.refuse(
            "classifier_from_token",
            "must name two tokens, such as ['no', 'yes'], and is_original_qwen3_reranker must be "
            "true with it",
        )
    names = config.part("id2label")
    count = 1 if tokens else len(names) or config.whole("num_labels", 2)
    labels = tuple(str(names.get(str(i), f"LABEL_{i}")) for i in range(count))
    activation = _activation(config, count)
    return PoolingSpec(
        task="classify",
        pooling=chosen.get("pooling", "last"),
        width=count,
        activation=activation if chosen.get("normalize", True) else "none",
        labels=labels,
        head_tokens=tuple(tokens),
    )


def _activation(config: HfConfig, count: int) -> Activation:
    """Return the function that makes probabilities of a head's outputs."""
    problem = config.get("problem_type")
    stated = config.part("sentence_transformers").get("activation_fn")
    if stated is not None:
        found: dict[str, Activation] = {"Identity": "none", "Sigmoid": "sigmoid"}
        name = str(stated).rpartition(".")[2]
        if name not in found:
            config.refuse(
                "sentence_transformers.activation_fn", f"{stated!r} is not Identity or Sigmoid"
            )
        return found[name]
    if problem == "regression":
        return "none"
    return "sigmoid" if count == 1 or problem == "multi_label_classification" else "softmax"


def _pooler_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return pooling type and normalisation of the option pooler_config, as far as it has them."""
    chosen: dict[str, Any] = {}
    for name, value in given.items():
        if name == "pooling_type":
            if str(value).lower() not in POOLING_TYPES:
                raise ValidationError(
                    "pooler_config", f"pooling_type must be LAST, MEAN or CLS, not {value!r}"
                )
            chosen["pooling"] = str(value).lower()
        elif name in ("normalize", "use_activation"):
            if not isinstance(value, bool) or "normalize" in chosen:
                raise ValidationError("pooler_config", f"{name} must be true or false, given once")
            chosen["normalize"] = value
        else:
            raise ValidationError(
                "pooler_config",
                f"{name!r} is not a field; the fields are pooling_type, normalize and "
                "use_activation",
            )
    return chosen


# The files of sentence-transformers.

_TRANSFORMER, _POOLING, _NORMALIZE = "Transformer", "Pooling", "Normalize"
_MODES: dict[str, PoolingType] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "lasttoken": "last",
    "mean": "mean",
    "cls": "cls",
}
"""Names of pooling types in 1_Pooling/config.json, older and newer ones."""


def _modules(folder: Path) -> list[dict[str, Any]] | None:
    """Return the modules of modules.json, or those that the folder 1_Pooling stands for.

    None for a folder without either.
    """
    file = folder / "modules.json"
    if not file.exists():
        pooled = (folder / "1_Pooling" / "config.json").exists()
        return [{"type": _POOLING, "path": "1_Pooling"}] if pooled else None
    try:
        found = msgspec.json.decode(file.read_bytes(), type=list[dict[str, Any]])
    except msgspec.MsgspecError as error:
        raise EngineStartError(f"model: {file} cannot be read: {error}") from None
    return found


def _of_modules(folder: Path, modules: list[dict[str, Any]] | None) -> tuple[PoolingType, bool]:
    """Return pooling type and normalisation; those of most decoders without any module."""
    if modules is None:
        return "last", True
    pooling, normalize = None, False
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == _POOLING:
            pooling = _pooling_type(folder / str(module.get("path", "")) / "config.json")
        elif kind == _NORMALIZE:
            normalize = True
        elif kind != _TRANSFORMER:
            raise EngineStartError(
                f"model: module {kind!r} in modules.json is not supported; supported are "
                f"{_TRANSFORMER}, {_POOLING}, {_NORMALIZE}"
            )
    return pooling or "last", normalize


def _pooling_type(file: Path) -> PoolingType:
    values = read_json(file) or {}
    if values.get("include_prompt") is False:
        raise EngineStartError(f"model: include_prompt false in {file} is not supported")
    mode = values.get("pooling_mode")
    chosen = [name for name, value in values.items() if "_mode_" in name and value is True]
    chosen += mode if isinstance(mode, list) else [mode] if mode is not None else []
    if len(chosen) != 1 or chosen[0] not in _MODES:
        raise EngineStartError(
            f"model: the pooling {', '.join(map(str, chosen)) or 'none'} in {file} is not "
            "supported; supported are lasttoken, mean_tokens and cls_token, one of them"
        )
    return _MODES[chosen[0]]
