"""The weight loader: the right slices, and one line that names the error."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sidestep.executor.layers.weight_loader import DummyWeights, SafetensorsWeights
from sidestep.ipc.common.errors import EngineStartError

CPU = torch.device("cpu")


def tensors() -> dict[str, Tensor]:
    return {"a.weight": torch.arange(24.0).view(6, 4), "b.weight": torch.arange(8.0).view(2, 4)}


def write(folder: Path, shards: int = 1) -> str:
    if shards == 1:
        save_file(tensors(), folder / "model.safetensors")
        return str(folder)
    weight_map = {}
    for i, (name, tensor) in enumerate(tensors().items()):
        file = f"model-{i + 1:05}-of-00002.safetensors"
        save_file({name: tensor}, folder / file)
        weight_map[name] = file
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return str(folder)


def load(
    folder: str, use: Callable[[SafetensorsWeights], object], dtype: torch.dtype = torch.float32
) -> None:
    with SafetensorsWeights(folder, dtype, CPU) as weights:
        use(weights)
        weights.finish()


def take_all(weights: SafetensorsWeights) -> None:
    weights.get("a.weight", (6, 4))
    weights.get("b.weight", (2, 4))


@pytest.mark.parametrize("shards", [1, 2])
def test_whole_tensors_rows_and_columns(tmp_path: Path, shards: int) -> None:
    whole = tensors()["a.weight"]
    with SafetensorsWeights(write(tmp_path, shards), torch.float32, CPU) as weights:
        assert torch.equal(weights.get("a.weight", (6, 4)), whole)
        assert torch.equal(weights.get("a.weight", (6, 4), rows=range(2, 5)), whole[2:5])
        columns = weights.get("a.weight", (6, 4), columns=range(1, 3))
        assert torch.equal(columns, whole[:, 1:3])
        assert columns.is_contiguous()
        assert weights.get("a.weight", (6, 4), rows=range(6, 6)).shape == (0, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_take_the_type_of_the_run(tmp_path: Path, dtype: torch.dtype) -> None:
    with SafetensorsWeights(write(tmp_path), dtype, CPU) as weights:
        assert weights.get("b.weight", (2, 4)).dtype == dtype


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match=r"lacks c\.weight"):
        load(write(tmp_path), lambda weights: weights.get("c.weight", (1,)))


def test_an_unexpected_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match=r"has b\.weight, which"):
        load(write(tmp_path), lambda weights: weights.get("a.weight", (6, 4)))


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    with pytest.raises(
        EngineStartError, match=re.escape("a.weight has shape [6, 4]") + ".*" + re.escape("[6, 5]")
    ):
        load(write(tmp_path), lambda weights: weights.get("a.weight", (6, 5)))


def test_what_follows_from_the_config_may_be_there(tmp_path: Path) -> None:
    save_file(
        {
            **tensors(),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
            "lm_head.weight": torch.ones(3),
        },
        tmp_path / "model.safetensors",
    )

    def use(weights: SafetensorsWeights) -> None:
        take_all(weights)
        weights.ignore("lm_head.weight")

    load(str(tmp_path), use)


def test_an_empty_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match="no safetensors files"):
        load(str(tmp_path), take_all)


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, 2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(EngineStartError, match=r"lacks model-00002-of-00002\.safetensors"):
        load(folder, take_all)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(EngineStartError, match=r"model\.safetensors cannot be read"):
        load(str(tmp_path), take_all)


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"weight_map": []}'])
def test_a_broken_index_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(EngineStartError, match=r"model\.safetensors\.index\.json"):
        load(str(tmp_path), take_all)


def test_other_safetensors_beside_the_model_are_not_read(tmp_path: Path) -> None:
    """Ignore other files of weights.

    Some repositories hold the same weights a second time under other names, such as
    consolidated.safetensors.
    """
    folder = write(tmp_path)
    save_file({"layers.0.other": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    load(folder, take_all)


def test_messages_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError) as error:
        load(write(tmp_path), lambda weights: None)
    assert "\n" not in str(error.value)


def test_dummy_weights_of_a_rank_are_a_part_of_the_whole() -> None:
    weights = DummyWeights(5, torch.float32, CPU)
    whole = weights.get("layer.weight", (8, 6))
    assert torch.equal(weights.get("layer.weight", (8, 6), rows=range(4, 8)), whole[4:])
    assert torch.equal(weights.get("layer.weight", (8, 6), columns=range(3)), whole[:, :3])
    assert not torch.equal(weights.get("other.weight", (8, 6)), whole)
    assert not torch.equal(DummyWeights(6, torch.float32, CPU).get("layer.weight", (8, 6)), whole)
    assert torch.equal(DummyWeights(5, torch.float32, CPU).get("layer.weight", (8, 6)), whole)
