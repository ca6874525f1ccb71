"""The quantization of a model: stated by its files, or asked for by the user."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import msgspec

from sidestep.ipc.common import registry
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.model.hf_config import HfConfig, read_json
from sidestep.ipc.model.quantization.quant_config import QuantConfig
from sidestep.ipc.model.quantization.weight_scheme import QuantizationSpec

OLDER_FILES = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
"""Files in which older tools state the quantization -> the method that each of them is of."""


class Reader(Protocol):
    """Reads what a method's files state."""

    def __call__(self, config: QuantConfig) -> QuantizationSpec:
        """Return the quantization. Raises EngineStartError for what is not supported."""


def stated_quantization(config: HfConfig) -> QuantConfig | None:
    """Return what a model's files state; None for plain weights."""
    if values := config.part("quantization_config") or config.part("compression_config"):
        return QuantConfig("quantization_config in config.json", values)
    for file, method in OLDER_FILES.items():
        found = read_json(Path(config.path) / file)
        if found is not None:
            return QuantConfig(file, {"quant_method": method, **found})
    return None


def read_quantization(config: HfConfig, wanted: str | None) -> QuantizationSpec | None:
    """Return how the model's matrices are quantized; None for plain ones.

    wanted: the user's choice: the method of the files, or one that quantizes plain weights. Raises
    EngineStartError for a method that is not supported, or that the files are not of.
    """
    stated = stated_quantization(config)
    if stated is None:
        return None if wanted is None else _online(wanted)
    method = stated.method
    if method not in registry.QUANTIZATIONS:
        raise EngineStartError(
            f"model: quantization {method!r} is not supported; supported are "
            f"{', '.join(sorted(registry.QUANTIZATIONS))}"
        )
    if wanted not in (None, method):
        raise EngineStartError(
            f"quantization: {wanted!r} does not fit the model, whose {stated.source} says "
            f"{method!r}"
        )
    reader: Reader = registry.load(registry.QUANTIZATIONS[method].spec)
    return msgspec.structs.replace(reader(stated), fp8_kv=_asks_for_fp8_kv(stated))


def _asks_for_fp8_kv(config: QuantConfig) -> bool:
    """Return whether the files ask for keys and values in e4m3, which is all that they may."""
    config = config if config.get("quantization") is None else config.part("quantization")
    if config.get("kv_cache_quant_algo") is not None:
        return bool(config.choice("kv_cache_quant_algo", ("FP8", "")) == "FP8")
    if config.get("kv_cache_scheme") is None:
        return False
    scheme = config.part("kv_cache_scheme")
    scheme.choice("type", ("float",), "float")
    scheme.choice("num_bits", (8,), 8)
    return True


def _online(wanted: str) -> QuantizationSpec:
    """Return the quantization of plain weights while they are loaded."""
    from sidestep.ipc.model.quantization.online import ONLINE, online_quantization

    if wanted not in ONLINE:
        raise EngineStartError(
            f"quantization: the model's weights are plain, which {wanted!r} cannot read; plain "
            f"weights can be quantized to {', '.join(sorted(ONLINE))}"
        )
    return online_quantization(wanted)
