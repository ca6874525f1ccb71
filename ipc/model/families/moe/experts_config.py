"""Read what config.json says of experts, in the words that several families share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from sidestep.ipc.model.families.decoder_config import read_activation
from sidestep.ipc.model.hf_config import HfConfig
from sidestep.ipc.model.layer_spec import (
    AttentionSpec,
    ExpertsSpec,
    LayerSpec,
    MlpSpec,
    RoutingSpec,
)


def read_experts(config: HfConfig, **fields: Any) -> ExpertsSpec:
    """Return the experts of a layer. fields: of ExpertsSpec, which replace what is read here."""
    read: dict[str, Any] = {"activation": read_activation(config)}
    if "num_experts" not in fields:
        read["num_experts"] = read_num_experts(config)
    if "width" not in fields:
        read["width"] = config.whole("moe_intermediate_size")
    if "routing" not in fields:
        read["routing"] = RoutingSpec(normalised=config.flag("norm_topk_prob"))
    if "num_chosen" not in fields:
        read["num_chosen"] = config.whole("num_experts_per_tok")
    spec = ExpertsSpec(**read | fields)
    num_experts, groups = spec.num_experts, spec.routing.groups
    if num_experts % groups or (groups > 1 and num_experts < 2 * groups):
        config.refuse("n_group", f"is {groups}, which does not divide {num_experts} experts")
    if not spec.routing.chosen_groups <= groups:
        config.refuse("topk_group", f"is {spec.routing.chosen_groups}, and n_group is {groups}")
    available = num_experts // groups * spec.routing.chosen_groups
    if spec.num_chosen > available:
        config.refuse("num_experts_per_tok", f"is {spec.num_chosen}, of {available} experts")
    return spec


def read_num_experts(config: HfConfig) -> int:
    """Return the number of experts, which newer files name num_local_experts."""
    newer, older = config.get("num_local_experts"), config.get("num_experts")
    if newer is not None and older is not None and newer != older:
        config.refuse("num_experts", f"is {older!r}, and num_local_experts is {newer!r}")
    return config.whole("num_experts" if newer is None else "num_local_experts")


def read_sparse_layers(config: HfConfig) -> list[bool]:
    """Return for each layer whether it has experts: decoder_sparse_step and mlp_only_layers."""
    every, dense = config.whole("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(one) is int for one in dense):
        config.refuse("mlp_only_layers", f"must be a list of whole numbers, not {dense!r}")
    num_layers = config.whole("num_hidden_layers")
    return [i not in dense and (i + 1) % every == 0 for i in range(num_layers)]


def mixed(
    attention: AttentionSpec,
    windows: Iterable[int],
    experts: ExpertsSpec,
    dense: MlpSpec,
    sparse: Iterable[bool],
) -> Iterator[LayerSpec]:
    """Yield layers with experts where `sparse` says so, and else with an MLP."""
    for window, has_experts in zip(windows, sparse, strict=True):
        mixer = msgspec.structs.replace(attention, window=window)
        yield LayerSpec(mixer=mixer, mlp=experts if has_experts else dense)
