"""GLM-4.5 and later: a sigmoid routes, a shared expert takes every token, first layers are dense.

Layers behind the last, which predict further tokens, are not used.
"""

from __future__ import annotations

from sidestep.ipc.model.families.decoder_config import (
    decoder,
    read_attention,
    read_mlp,
    read_windows,
)
from sidestep.ipc.model.families.moe.experts_config import mixed, read_experts
from sidestep.ipc.model.hf_config import HfConfig
from sidestep.ipc.model.layer_spec import ExpertNames, RoutingSpec
from sidestep.ipc.model.model_spec import ModelSpec
from sidestep.ipc.model.rope_config import read_rope


def glm4_moe(config: HfConfig) -> ModelSpec:
    """Read a config.json of GLM-4.5."""
    routing = RoutingSpec(
        scores="sigmoid",
        normalised=config.flag("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", 1.0),
        bias=True,
        groups=config.whole("n_group", 1),
        chosen_groups=config.whole("topk_group", 1),
    )
    shared = config.whole("n_shared_experts", 1, least=0)
    experts = read_experts(
        config,
        num_experts=config.whole("n_routed_experts"),
        routing=routing,
        shared_width=shared * config.whole("moe_intermediate_size"),
        names=ExpertNames(shared="shared_experts"),
    )
    attention = read_attention(
        config,
        rope=read_rope(config, rotated=0.5),
        output_bias=False,
        head_norms=config.flag("use_qk_norm"),
    )
    num_layers = config.whole("num_hidden_layers")
    first = config.whole("first_k_dense_replace", 1, least=0)
    sparse = [layer >= first for layer in range(num_layers)]
    return decoder(
        config,
        mixed(attention, read_windows(config), experts, read_mlp(config), sparse),
        unused_layers=config.whole("num_nextn_predict_layers", 0, least=0),
    )
