"""Reader of OLMo's config.json.

This module must not import torch: the frontend reads it before workers start.
"""

from __future__ import annotations

import msgspec

from sidestep.ipc.model.families.llama import llama
from sidestep.ipc.model.hf_config import HfConfig
from sidestep.ipc.model.layer_spec import NormSpec
from sidestep.ipc.model.model_spec import ModelSpec


def olmo(config: HfConfig) -> ModelSpec:
    """Return Llama's spec, with the eps that OLMo's norms have whatever the file says."""
    if (clip := config.get("clip_qkv")) is not None:
        config.refuse("clip_qkv", f"{clip!r} is not supported; supported is null")
    return msgspec.structs.replace(llama(config), norm=NormSpec(eps=1e-5))
