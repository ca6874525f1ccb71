"""What Granite's config.json says. No torch here: the frontend reads it before workers start."""

from __future__ import annotations

import msgspec

from sidestep.ipc.hf_config import HfConfig
from sidestep.ipc.model_families import llama
from sidestep.ipc.model_spec import ModelSpec

FACTORS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")


def granite(config: HfConfig) -> ModelSpec:
    """As Llama, with four factors that the model class reads from `extra`."""
    extra = {name: config.number(name, 1.0) for name in FACTORS}
    return msgspec.structs.replace(llama(config), extra=extra)
