"""OLMoE: experts in all layers; the q and the k of all heads are normed."""

from __future__ import annotations

from sidestep.ipc.model.families.decoder_config import alike, decoder, read_attention, read_windows
from sidestep.ipc.model.families.moe.experts_config import read_experts
from sidestep.ipc.model.hf_config import HfConfig
from sidestep.ipc.model.model_spec import ModelSpec


def olmoe(config: HfConfig) -> ModelSpec:
    """Read a config.json of OLMoE. Raises EngineStartError where q, k and v are clipped."""
    if (clip := config.get("clip_qkv")) is not None:
        config.refuse("clip_qkv", f"{clip!r} is not supported; supported is null")
    experts = read_experts(config, width=config.whole("intermediate_size"))
    attention = read_attention(config, row_norms=True)
    return decoder(config, alike(attention, experts, read_windows(config)))
