"""Reader of Granite's config.json.

This module must not import torch: the frontend reads it before workers start.
"""

from __future__ import annotations

import msgspec

from sidestep.ipc.model.families.llama import llama
from sidestep.ipc.model.hf_config import HfConfig
from sidestep.ipc.model.model_spec import ModelSpec

FACTORS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")


def granite(config: HfConfig) -> ModelSpec:
    """Return Llama's spec, with four factors in `extra` that the model class reads."""
    extra = {name: config.number(name, 1.0) for name in FACTORS}
    return msgspec.structs.replace(llama(config), extra=extra)
