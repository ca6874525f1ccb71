"""The sizes that specifications of layers state are those of real small models."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from sidestep.executor.gpu.cuda_graphs import worthwhile_tokens
from sidestep.executor.models.decoder import attention_shape
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.ipc.model.kv.kv_layout import kv_layout
from sidestep.ipc.model.layer_split import stage_of
from sidestep.ipc.model.model_size import layers_size, num_parameters, table_size
from sidestep.ipc.model.model_spec import load_model_spec
from tests.e2e.models import FAMILIES, write_model


def sizes_in(folder: str) -> dict[str, tuple[int, int]]:
    """By name, the dimensions and the number of parameters of each tensor of a checkpoint.

    Where a tensor is of all experts, the dimensions are those of one of them.
    """
    found = {}
    for file in Path(folder).glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                tensor = tensors.get_tensor(name)
                fused = re.search(r"\.experts\.[a-z]", name)
                found[name] = tensor.dim() - bool(fused), tensor.numel()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_counts_equal_those_of_a_checkpoint(family: str, tmp_path: Path) -> None:
    path = write_model(family, tmp_path)
    spec, tensors = load_model_spec(path), sizes_in(path)
    assert num_parameters(spec, first=True, last=True) == sum(n for _, n in tensors.values())
    layer, of_layer = spec.layers[1].size(spec.hidden_size), "model.layers.1."
    # The kernel of a convolution, of three dimensions, is no product's.
    for dimensions, expected in (((2,), layer.matrices), ((1, 3), layer.vectors)):
        assert expected == sum(
            n
            for name, (dims, n) in tensors.items()
            if name.startswith(of_layer) and dims in dimensions
        )
    assert table_size(spec) == tensors["model.embed_tokens.weight"][1]
    shape = attention_shape(spec, Parallel(), stage_of((spec.num_layers,), 0))
    assert shape.kv_layout(torch.float32, 16) == kv_layout(spec, itemsize=4, block_size=16)
    # Tokens whose operations take twice the time of launching a layer.
    active = layers_size(spec).active / spec.num_layers
    assert worthwhile_tokens(spec) == pytest.approx(450e-6 * 5e14 / active, abs=1)
