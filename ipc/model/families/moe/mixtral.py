"""Mixtral: Mistral with experts in all layers, under names of their own."""

from __future__ import annotations

from sidestep.ipc.model.families.decoder_config import alike, decoder, read_attention, read_windows
from sidestep.ipc.model.families.moe.experts_config import read_experts
from sidestep.ipc.model.hf_config import HfConfig
from sidestep.ipc.model.layer_spec import ExpertNames, RoutingSpec
from sidestep.ipc.model.model_spec import ModelSpec

NAMES = ExpertNames(layer="block_sparse_moe", gate="w1", up="w3", down="w2")


def mixtral(config: HfConfig) -> ModelSpec:
    """Read a config.json of Mixtral."""
    experts = read_experts(
        config,
        num_experts=config.whole("num_local_experts"),
        width=config.whole("intermediate_size"),
        routing=RoutingSpec(normalised=True),
        names=NAMES,
    )
    windows = read_windows(config, config.whole("sliding_window", 0, least=0))
    return decoder(config, alike(read_attention(config), experts, windows))
