"""The rotary embedding of a config.json, checked and complete, and its number of positions.

Values that transformers derives from other fields are filled in here, so that the computation needs
no other field of config.json.
"""

from __future__ import annotations

from typing import Any

from sidestep.ipc.common.errors import EngineStartError, ValidationError
from sidestep.ipc.model.hf_config import HfConfig, is_number
from sidestep.ipc.model.layer_spec import RopeSpec

_ORIGINAL = "original_max_position_embeddings"
_OPTIONAL = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_NUMBERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", _ORIGINAL, *_OPTIONAL),
}
"""Rope type -> names of the numbers that scale it."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (1,),
    "attn_factor": (1,),
    "extrapolation_factor": (1,),
    "finetuned": (True, False),
}
"""Known fields -> the values with which they change nothing."""
ROPE_TYPES = tuple(_NUMBERS)


def read_rope(config: HfConfig) -> RopeSpec:
    """Return the embedding that rope_parameters, or rope_scaling and rope_theta, describe.

    Raises EngineStartError, which names the value that is wrong or not supported.
    """
    rope = config.part("rope_parameters")
    given = {name: value for name, value in rope.items() if value is not None}
    old_name, rope_type = given.pop("type", None), given.pop("rope_type", None)
    rope_type = rope_type or old_name or "default"
    if rope_type not in ROPE_TYPES:
        raise EngineStartError(
            f"model: rope type {rope_type!r} is not supported; supported are "
            f"{', '.join(ROPE_TYPES)}"
        )
    theta = given.pop("rope_theta", None)
    theta = config.number("rope_theta", 10000.0) if theta is None else theta
    _check(config, "rope_theta", theta)
    scaling = _scaling(config, rope_type, given)
    if rope_type == "yarn" and isinstance(given.get("truncate"), bool):
        scaling["truncate"] = given.pop("truncate")
    _refuse_others(config, rope_type, given)
    return RopeSpec(theta=float(theta), rope_type=rope_type, scaling=scaling)


def _scaling(config: HfConfig, rope_type: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the type's numbers, with transformers' defaults for the lengths."""
    length = config.whole("max_position_embeddings")
    original = config.get(_ORIGINAL) or given.get(_ORIGINAL)
    scaling: dict[str, Any] = {}
    for name in _NUMBERS[rope_type]:
        value = original or length if name == _ORIGINAL else given.get(name)
        if value is None and (name, rope_type) == ("factor", "yarn") and isinstance(original, int):
            value = length / original
        if value is None and name not in _OPTIONAL:
            config.refuse(f"{name} of rope type {rope_type!r}", "is missing")
        if value is not None:
            _check(config, name, value)
            scaling[name] = value
    return scaling


def _check(config: HfConfig, name: str, value: Any) -> None:
    if not is_number(value) or value < 0 or (value == 0 and name not in _OPTIONAL):
        config.refuse(
            f"{name} of the rotary embedding", f"must be a positive number, not {value!r}"
        )


def _refuse_others(config: HfConfig, rope_type: str, given: dict[str, Any]) -> None:
    """Raise EngineStartError for a field that might change the embedding in an unknown way."""
    for name, value in given.items():
        if name not in (*_NUMBERS[rope_type], _ORIGINAL) and value not in _NEUTRAL.get(name, ()):
            config.refuse(f"{name} of rope type {rope_type!r}", f"is not supported ({value!r})")


def longest_positions(config: HfConfig, rope: RopeSpec) -> int:
    """Return the number of positions that the model is made for.

    YaRN stretches the length of the training by its factor. max_position_embeddings may be either
    of the two lengths, so it is used only if the user gives it.
    """
    stated = config.whole("max_position_embeddings")
    if rope.rope_type != "yarn":
        return stated
    stretched = int(rope.scaling[_ORIGINAL] * rope.scaling["factor"])
    if "max_position_embeddings" not in config.overridden:
        return stretched
    if stated > stretched:
        raise ValidationError(
            "hf_overrides",
            f"max_position_embeddings {stated} is more than YaRN "
            f"reaches, which is {_ORIGINAL} times factor ({stretched})",
        )
    return stated
