"""The rotary embedding of a config.json, checked and complete, and its number of positions.

Values that transformers derives from other fields are filled in here, so that the computation needs
no other field of config.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sidestep.ipc.common.errors import EngineStartError, ValidationError
from sidestep.ipc.model.hf_config import HfConfig, is_number
from sidestep.ipc.model.layer_spec import RopeSpec

FULL, SLIDING = "full_attention", "sliding_attention"
"""Types of layers."""
ROTATED = "partial_rotary_factor"
"""The rotated part of each head."""
_ORIGINAL = "original_max_position_embeddings"
_OPTIONAL = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_DEFAULTS = {("proportional", "factor"): 1.0, ("proportional", ROTATED): 1.0}
"""Values of missing numbers, by the type and the number's name."""
_NUMBERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", _ORIGINAL, *_OPTIONAL),
    "longrope": ("factor", _ORIGINAL, "attention_factor"),
    "proportional": ("factor", ROTATED),
}
"""Rope type -> names of the numbers that scale it."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attn_factor": (1,),
    "extrapolation_factor": (1,),
    "finetuned": (True, False),
}
"""Known fields -> the values with which they change nothing."""
ROPE_TYPES = tuple(_NUMBERS)
QUERY_BETA = "llama_4_scaling_beta"
"""How fast queries grow with their positions: a field of some families' rotary embeddings."""


def read_rope(
    config: HfConfig,
    *,
    layer_type: str = "",
    theta: float = 10000.0,
    rotated: float | None = None,
    interleaved: bool = False,
    scales_queries: bool = False,
    ignored: Sequence[str] = (),
) -> RopeSpec:
    """Return the embedding that rope_parameters, or rope_scaling and rope_theta, describe.

    layer_type: the type of layers whose embedding is read, where the file has one for each type.
    theta: the family's default. rotated: the family's default for the rotated part of each head;
    None if the family always rotates whole heads. interleaved: see RopeSpec. scales_queries:
    whether the family's queries grow with their positions. ignored: fields of the family that
    change nothing for text.

    Raises EngineStartError, which names the value that is wrong or not supported.
    """
    rope = config.part("rope_parameters")
    if layer_type in rope:
        rope = rope[layer_type]
    given = {name: value for name, value in rope.items() if value is not None}
    given = {name: value for name, value in given.items() if name not in ignored}
    dims = None
    # The pairs of a proportional rope are those of whole heads, of which some are not rotated.
    if given.get("rope_type") != "proportional":
        dims = _rotated_dims(config, given, 1.0 if rotated is None else rotated)
    if rotated is None and dims is not None:
        config.refuse(ROTATED, "must be 1 for this architecture")
    old_name, rope_type = given.pop("type", None), given.pop("rope_type", None)
    rope_type = rope_type or old_name or "default"
    if rope_type not in ROPE_TYPES:
        raise EngineStartError(
            f"model: rope type {rope_type!r} is not supported; supported are "
            f"{', '.join(ROPE_TYPES)}"
        )
    stated = given.pop("rope_theta", None)
    theta = config.number("rope_theta", theta) if stated is None else stated
    _check(config, "rope_theta", theta)
    scaling = _scaling(config, rope_type, given)
    if rope_type == "longrope":
        scaling |= _long_factors(config, given, dims)
    if rope_type == "yarn" and isinstance(given.get("truncate"), bool):
        scaling["truncate"] = given.pop("truncate")
    if scales_queries:
        scaling[QUERY_BETA] = _query_beta(config, given, scaling)
    _refuse_others(config, rope_type, given)
    return RopeSpec(
        theta=float(theta), rope_type=rope_type, scaling=scaling, dims=dims, interleaved=interleaved
    )


def read_local_rope(config: HfConfig, theta: float) -> RopeSpec:
    """Return the embedding of the layers with a window, in a family that has two embeddings.

    theta: its base in files that describe only the embedding of the other layers.
    """
    if SLIDING in config.part("rope_parameters"):
        return read_rope(config, layer_type=SLIDING, theta=theta)
    return RopeSpec(theta=theta)


def read_head_dim(config: HfConfig) -> int:
    """Return the size of a head."""
    heads, hidden_size = config.whole("num_attention_heads"), config.whole("hidden_size")
    return config.whole("head_dim", hidden_size // heads)


def _rotated_dims(config: HfConfig, given: dict[str, Any], default: float) -> int | None:
    """Return how many values of a head are rotated; None for all."""
    name, head_dim = ROTATED, read_head_dim(config)
    older = config.get(name)
    part = given.pop(name, older if older is not None else default)
    if not is_number(part) or not 0 < part <= 1:
        config.refuse(name, f"must be a number above 0 and at most 1, not {part!r}")
    dims = int(head_dim * part)
    if dims % 2 and dims != head_dim:
        config.refuse(name, f"{part} rotates {dims} of {head_dim} values, an odd number")
    return None if dims == head_dim else dims


def _long_factors(config: HfConfig, given: dict[str, Any], dims: int | None) -> dict[str, Any]:
    """Return LongRoPE's two lists, which divide the speed of each pair."""
    pairs = (dims or read_head_dim(config)) // 2
    lists = {name: given.pop(name, None) for name in ("short_factor", "long_factor")}
    for name, value in lists.items():
        if not isinstance(value, list) or len(value) != pairs or not all(map(is_number, value)):
            config.refuse(f"{name} of rope type 'longrope'", f"must be a list of {pairs} numbers")
    return lists


def _query_beta(config: HfConfig, given: dict[str, Any], scaling: dict[str, Any]) -> float:
    """Return how fast queries grow, behind the original length."""
    beta = given.pop(QUERY_BETA, None)
    given.pop("max_position_embeddings", None)  # the same as outside this object
    if not is_number(beta) or beta < 0:
        config.refuse(f"{QUERY_BETA} of the rotary embedding", f"must be a number, not {beta!r}")
    if _ORIGINAL not in scaling:
        config.refuse("rope_type", "must be 'yarn' for this architecture")
    return float(beta)


def _scaling(config: HfConfig, rope_type: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the type's numbers, with transformers' defaults for the lengths."""
    length = config.whole("max_position_embeddings")
    original = config.get(_ORIGINAL) or given.get(_ORIGINAL)
    scaling: dict[str, Any] = {}
    if rope_type == "proportional" and is_number(part := given.get(ROTATED, 1.0)) and part > 1:
        config.refuse(ROTATED, f"must be a number above 0 and at most 1, not {part!r}")
    for name in _NUMBERS[rope_type]:
        value = original or length if name == _ORIGINAL else given.get(name)
        derived = (name, rope_type) in (("factor", "yarn"), ("factor", "longrope"))
        if value is None and derived and isinstance(original, int):
            value = length / original
        if value is None:
            value = _DEFAULTS.get((rope_type, name))
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


def longest_positions(config: HfConfig, rope: RopeSpec | None) -> int:
    """Return the number of positions that the model is made for.

    YaRN stretches the length of the training by its factor. max_position_embeddings may be either
    of the two lengths, so it is used only if the user gives it.
    """
    stated = config.whole("max_position_embeddings")
    if rope is None or rope.rope_type != "yarn":
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
