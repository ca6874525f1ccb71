"""The user's choice of how keys and values are kept."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sidestep.ipc.common.options import require
from sidestep.ipc.model.layer_size import KvFormat
from sidestep.ipc.model.layer_spec import AttentionSpec, LayerSpec
from sidestep.ipc.model.model_spec import ModelSpec

AUTO = "auto"
"""The choice of what the model's files ask for: e4m3, or else the model's type."""
KV_CACHE_DTYPES: dict[str, KvFormat] = {
    AUTO: "model",
    "model": "model",
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "int8": "int8",
    "fp8_per_token_head": "fp8",
    "int8_per_token_head": "int8",
    "int4_per_token_head": "int4",
}
"""Choices, with vLLM's names, and one for the model's type whatever its files ask for."""
_WITH_SCALES = ("fp8", "fp8_e4m3")
"""Choices that take the checkpoint's scales, where it has some."""
SLIDING_WINDOW = "sliding_window"
"""The word for all layers with a window."""
_SKIP = "kv_cache_dtype_skip_layers"


def with_kv_cache_dtype(
    spec: ModelSpec, dtype: str, skipped: Sequence[str] | None = None
) -> ModelSpec:
    """Return the spec of a model whose layers keep their keys and values so.

    skipped: indices of layers that keep the model's type, and perhaps SLIDING_WINDOW. Raises
    ValidationError for a layer that there is not.
    """
    if dtype == AUTO and spec.quantization is not None and spec.quantization.fp8_kv:
        dtype = "fp8"
    if KV_CACHE_DTYPES[dtype] == "model":
        require(not skipped, _SKIP, f"has a meaning only with codes, not with {dtype!r}")
        return spec
    left_out = _skipped_layers(spec, skipped or ())
    layers = tuple(
        layer if _owner(layer, index) in left_out else _kept(layer, dtype)
        for index, layer in enumerate(spec.layers)
    )
    return msgspec.structs.replace(spec, layers=layers)


def _owner(layer: LayerSpec, index: int) -> int:
    """Return the index of the layer whose keys and values a layer reads: mostly its own."""
    return index - layer.mixer.kv_back if isinstance(layer.mixer, AttentionSpec) else index


def _kept(layer: LayerSpec, dtype: str) -> LayerSpec:
    """Return a layer whose keys and values, if it has some, are kept so."""
    if not isinstance(layer.mixer, AttentionSpec):
        return layer
    mixer = msgspec.structs.replace(
        layer.mixer, kv_format=KV_CACHE_DTYPES[dtype], kv_scales=dtype in _WITH_SCALES
    )
    return msgspec.structs.replace(layer, mixer=mixer)


def _skipped_layers(spec: ModelSpec, skipped: Sequence[str]) -> set[int]:
    """Return the indices of the layers that are left out."""
    mixers = {
        index: layer.mixer
        for index, layer in enumerate(spec.layers)
        if isinstance(layer.mixer, AttentionSpec)
    }
    found: set[int] = set()
    for word in skipped:
        if word == SLIDING_WINDOW:
            windowed = {index for index, mixer in mixers.items() if mixer.window}
            require(bool(windowed), _SKIP, "the model has no layers with a window")
            found |= windowed
            continue
        require(
            word.isdecimal() and int(word) in mixers,
            _SKIP,
            f"{word!r} is neither {SLIDING_WINDOW!r} nor the index of one of the model's "
            f"{len(mixers)} layers with attention",
        )
        found.add(int(word))
    return found
