"""The architectures whose GGUF files are read, and the names of their tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.model.gguf.header import GgufHeader


class Architecture(NamedTuple):
    """The properties of the files of one architecture."""

    name: str
    """Name in config.json."""
    pairs: bool = False
    """Whether the rows of q and k are ordered for a rotary embedding of neighbours."""
    norm_offset: float = 0.0
    """The number that the files add to the weights of norms."""
    names: dict[str, str] = {}
    """Names of a layer's tensors that differ from the usual ones, or are further ones."""
    values: dict[str, object] = {}
    """Fields of config.json that the files do not state."""


_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA = {**_AFTER, "ffn_norm": "pre_feedforward_layernorm"}
_GELU: dict[str, object] = {"hidden_activation": "gelu_pytorch_tanh"}
_FUSED_MLP = {"ffn_up": "mlp.gate_up_proj"}

ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", pairs=True),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", values={"norm_topk_prob": False}),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", values={"norm_topk_prob": True}),
    "gemma2": Architecture("Gemma2ForCausalLM", norm_offset=1.0, names=_GEMMA, values=_GELU),
    "gemma3": Architecture("Gemma3ForCausalLM", norm_offset=1.0, names=_GEMMA, values=_GELU),
    "phi3": Architecture("Phi3ForCausalLM", names={"attn_qkv": "self_attn.qkv_proj", **_FUSED_MLP}),
    "glm4": Architecture(
        "Glm4ForCausalLM",
        names={
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            **_FUSED_MLP,
        },
    ),
    "olmo2": Architecture("Olmo2ForCausalLM", names=_AFTER),
    "granite": Architecture("GraniteForCausalLM", pairs=True),
    "smollm3": Architecture("SmolLM3ForCausalLM", pairs=True),
}
"""general.architecture -> what its files are like."""

_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
"""Names of a layer's tensors -> those that layers ask for."""
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
"""Names of tensors that hold a matrix of each expert."""
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that the model's specification has, and no layer."""
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)$")


class Named(NamedTuple):
    """Some rows of a stored tensor, under the name that a layer asks for."""

    name: str
    stored: str
    heads: int = 0
    """Heads whose rows are ordered in pairs; 0 for rows in their order."""
    item: int | None = None
    """Which of the matrices of a tensor [E, N, K]; None for the whole tensor."""
    row: bool = False
    """Whether a tensor [K] is asked for as a matrix [1, K]."""
    norm_offset: float = 0.0
    """The number that has been added to the values."""


def architecture_of(header: GgufHeader) -> Architecture:
    """Return the architecture of a file. Raises EngineStartError if it is not supported."""
    name = header.values.get("general.architecture")
    if name not in ARCHITECTURES:
        raise EngineStartError(
            f"model: the GGUF architecture {name!r} of {header.path} is not supported; supported "
            f"are {', '.join(sorted(ARCHITECTURES))}"
        )
    return ARCHITECTURES[name]


def named_tensors(header: GgufHeader) -> Iterator[Named]:
    """Yield the tensors of a file by the names that layers ask for.

    A tensor that no table names keeps its own name, which no layer asks for.
    """
    kind, arch = architecture_of(header), header.values["general.architecture"]
    names = _NAMES | kind.names
    heads = header.values.get(f"{arch}.attention.head_count", 0)
    heads_of = {
        "attn_q": heads,
        "attn_k": header.values.get(f"{arch}.attention.head_count_kv", heads),
    }
    for stored, tensor in header.tensors.items():
        if stored in FACTORS:
            continue
        found = _LAYER.match(stored)
        if found is None or found[2] not in (names | _EXPERTS):
            norm_offset = kind.norm_offset if stored == "output_norm.weight" else 0.0
            yield Named(_TOP.get(stored, stored), stored, norm_offset=norm_offset)
            continue
        layer, part, end = found.groups()
        before = f"model.layers.{layer}"
        if part in _EXPERTS:
            for item in range(tensor.shape[0]):
                name = f"{before}.mlp.experts.{item}.{_EXPERTS[part]}.{end}"
                yield Named(name, stored, item=item)
            continue
        yield Named(
            f"{before}.{names[part]}.{end}",
            stored,
            heads=heads_of.get(part, 0) if kind.pairs else 0,
            row=part == "ffn_gate_inp_shexp",
            norm_offset=kind.norm_offset if part.endswith("norm") else 0.0,
        )
