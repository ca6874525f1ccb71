"""Every registered family: its specification and its model class agree, whole and in parts.

tests/unit/executor/test_model_runner.py compares the same families' tokens with transformers', and
test_model_size.py their sizes with those of checkpoints.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sidestep.executor.attention.base import AttentionSetup
from sidestep.executor.attention.mixed_shapes import open_attention
from sidestep.executor.attention.rotary import RotaryTable
from sidestep.executor.attention.torch_backend import TorchAttention
from sidestep.executor.models.decoder import attention_shape, distinct_ropes, layers_of
from sidestep.executor.models.model_loading import MULTIMODAL, model_class
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.ipc.common import registry
from sidestep.ipc.model.kv.kv_layout import kv_layout
from sidestep.ipc.model.layer_spec import attention_of
from sidestep.ipc.model.layer_split import split_layers, stage_of, why_one_stage
from sidestep.ipc.model.model_size import num_parameters
from sidestep.ipc.model.model_spec import ModelSpec, load_model_spec
from tests.counting_weights import CountingWeights
from tests.e2e.models import FAMILIES

CPU = torch.device("cpu")


def _architecture(family: str) -> str:
    """Return the name that transformers gives to the class of a family's config."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[FAMILIES[family]().model_type])


ARCHITECTURES = {family: _architecture(family) for family in FAMILIES}


def read_spec(family: str, folder: Path) -> ModelSpec:
    """Return the spec of a family whose folder has nothing but a config.json."""
    config = FAMILIES[family]()
    config.architectures = [ARCHITECTURES[family]]
    config.save_pretrained(folder)
    return load_model_spec(str(folder))


def test_every_architecture_of_the_registry_is_tested() -> None:
    """Leave models of several modalities to test_multimodal.py."""
    text = {name for name in registry.MODELS if not name.endswith(MULTIMODAL)}
    assert text == set(ARCHITECTURES.values())


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_and_stages_read_and_keep_what_the_specification_says(
    family: str, ranks: int, tmp_path: Path
) -> None:
    spec = read_spec(family, tmp_path)
    if not all(one.fits(ranks) for one in spec.divided):
        assert ranks == 4, "all these models divide among two ranks"
        return
    parallel = Parallel()
    parallel.size = ranks  # rank 0, whose part of the vocabulary has no padding
    whole = (spec.num_layers,)
    splits = [whole, *([] if why_one_stage(spec) else [split_layers(spec, 2)])]
    for layers in splits:
        for index in range(len(layers)):
            stage, weights = stage_of(layers, index), CountingWeights()
            own = layers_of(spec, stage)
            mixers = attention_of(own)
            model_class(spec.architecture)(spec, weights, parallel, stage)
            assert weights.count == num_parameters(
                spec, ranks, own, first=stage.is_first, last=stage.is_last
            )
            setup = AttentionSetup(
                shape=attention_shape(spec, parallel, stage),
                num_blocks=3,
                block_size=8,
                dtype=torch.float32,
                device=CPU,
                rotary=[
                    RotaryTable(rope, head_dim, 8, CPU) for rope, head_dim in distinct_ropes(mixers)
                ],
                norm_eps=spec.norm.eps,
                max_rows=1,
            )
            layout = kv_layout(spec, ranks, own, itemsize=4, block_size=8)
            assert open_attention(TorchAttention, setup).cache.nbytes == 3 * layout.block_bytes
