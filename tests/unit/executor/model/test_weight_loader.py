"""The weight loader: the right slices, and one line that names the error."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sidestep.executor.weights.checkpoints import TorchWeights, open_checkpoint
from sidestep.executor.weights.device_copies import lines_of, pieces_of
from sidestep.executor.weights.weight_loader import (
    CheckpointWeights,
    DummyWeights,
    SafetensorsWeights,
)
from sidestep.ipc.common.errors import EngineStartError

CPU = torch.device("cpu")
Kind = type[CheckpointWeights]
KINDS: list[Kind] = [SafetensorsWeights, TorchWeights]


def tensors() -> dict[str, Tensor]:
    return {"a.weight": torch.arange(24.0).view(6, 4), "b.weight": torch.arange(8.0).view(2, 4)}


def save(kind: Kind, tensors: dict[str, Tensor], file: Path) -> None:
    if kind is TorchWeights:
        torch.save(tensors, file)
    else:
        save_file(tensors, file)


def write(folder: Path, kind: Kind = SafetensorsWeights, shards: int = 1) -> str:
    if shards == 1:
        save(kind, tensors(), folder / kind.whole_file)
        return str(folder)
    weight_map = {}
    stem, _, ending = kind.whole_file.partition(".")
    for i, (name, tensor) in enumerate(tensors().items()):
        file = f"{stem}-{i + 1:05}-of-00002.{ending}"
        save(kind, {name: tensor}, folder / file)
        weight_map[name] = file
    (folder / kind.index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return str(folder)


def opened(
    folder: str, dtype: torch.dtype = torch.float32, load_format: str = "auto"
) -> CheckpointWeights:
    return open_checkpoint(folder, load_format, dtype, CPU)


def load(
    folder: str, use: Callable[[CheckpointWeights], object], dtype: torch.dtype = torch.float32
) -> None:
    with opened(folder, dtype) as weights:
        use(weights)
        weights.finish()


def take_all(weights: CheckpointWeights) -> None:
    weights.get("a.weight", (6, 4))
    weights.get("b.weight", (2, 4))


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_whole_tensors_rows_and_columns(tmp_path: Path, kind: Kind, shards: int) -> None:
    whole = tensors()["a.weight"]
    with opened(write(tmp_path, kind, shards)) as weights:
        assert type(weights) is kind
        assert torch.equal(weights.get("a.weight", (6, 4)), whole)
        assert torch.equal(weights.get("a.weight", (6, 4), rows=range(2, 5)), whole[2:5])
        columns = weights.get("a.weight", (6, 4), columns=range(1, 3))
        assert torch.equal(columns, whole[:, 1:3])
        assert columns.is_contiguous()
        assert weights.get("a.weight", (6, 4), rows=range(6, 6)).shape == (0, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_items_of_a_tensor(tmp_path: Path, kind: Kind) -> None:
    whole = tensors()["a.weight"]
    with opened(write(tmp_path, kind)) as weights:
        assert torch.equal(weights.item("a.weight", (6, 4), 5), whole[5])
        assert torch.equal(weights.item("a.weight", (6, 4), 2, rows=range(1, 3)), whole[2, 1:3])
        with pytest.raises(EngineStartError, match=r"a\.weight has shape \[6, 4\]"):
            weights.item("a.weight", (6, 5), 0)
        with pytest.raises(EngineStartError, match=r"a\.weight is torch\.float32 .* not uint8"):
            weights.packed_item("a.weight", (6, 4), 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_take_the_type_of_the_run(tmp_path: Path, kind: Kind, dtype: torch.dtype) -> None:
    with opened(write(tmp_path, kind), dtype) as weights:
        assert weights.get("b.weight", (2, 4)).dtype == dtype


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_tensor_is_named(tmp_path: Path, kind: Kind) -> None:
    with pytest.raises(EngineStartError, match=r"lacks c\.weight"):
        load(write(tmp_path, kind), lambda weights: weights.get("c.weight", (1,)))


@pytest.mark.parametrize("kind", KINDS)
def test_an_unexpected_tensor_is_named(tmp_path: Path, kind: Kind) -> None:
    with pytest.raises(EngineStartError, match=r"has b\.weight, which"):
        load(write(tmp_path, kind), lambda weights: weights.get("a.weight", (6, 4)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path, kind: Kind) -> None:
    with pytest.raises(
        EngineStartError, match=re.escape("a.weight has shape [6, 4]") + ".*" + re.escape("[6, 5]")
    ):
        load(write(tmp_path, kind), lambda weights: weights.get("a.weight", (6, 5)))


def test_what_follows_from_the_config_may_be_there(tmp_path: Path) -> None:
    save_file(
        {
            **tensors(),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
            "lm_head.weight": torch.ones(3),
        },
        tmp_path / "model.safetensors",
    )

    def use(weights: CheckpointWeights) -> None:
        take_all(weights)
        weights.ignore("lm_head.weight")

    load(str(tmp_path), use)


@pytest.mark.parametrize(
    ("load_format", "names"),
    [
        ("auto", "no safetensors nor pytorch_model.bin files"),
        ("safetensors", "no safetensors files"),
        ("pt", "no pytorch_model.bin files"),
    ],
)
def test_an_empty_folder_says_so(tmp_path: Path, load_format: str, names: str) -> None:
    with pytest.raises(EngineStartError, match=names):
        opened(str(tmp_path), load_format=load_format)


def test_safetensors_come_first_and_a_format_may_be_asked_for(tmp_path: Path) -> None:
    write(tmp_path)
    folder = write(tmp_path, TorchWeights)
    kinds = [type(opened(folder, load_format=one)) for one in ("auto", "safetensors", "pt")]
    assert kinds == [SafetensorsWeights, SafetensorsWeights, TorchWeights]


def test_the_index_of_files_that_were_not_fetched_does_not_count(tmp_path: Path) -> None:
    folder = write(tmp_path, SafetensorsWeights, 2)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(EngineStartError, match=r"lacks model-00001-of-00002\.safetensors, model-0"):
        opened(folder)
    assert type(opened(write(tmp_path, TorchWeights))) is TorchWeights


@pytest.mark.parametrize("kind", KINDS)
def test_a_shard_that_is_not_there_is_named(tmp_path: Path, kind: Kind) -> None:
    folder = write(tmp_path, kind, 2)
    (gone,) = tmp_path.glob("*-00002-of-00002.*")
    gone.unlink()
    with pytest.raises(EngineStartError, match=f"lacks {gone.name}"):
        load(folder, take_all)


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_file_is_named(tmp_path: Path, kind: Kind) -> None:
    write(tmp_path, kind)
    whole = (tmp_path / kind.whole_file).read_bytes()
    for content in (b"not a checkpoint", b"", whole[: len(whole) // 2]):
        (tmp_path / kind.whole_file).write_bytes(content)
        with pytest.raises(EngineStartError, match=rf"{kind.whole_file} cannot be read") as caught:
            load(str(tmp_path), take_all)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"weight_map": []}'])
@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_index_is_named(tmp_path: Path, kind: Kind, content: str) -> None:
    (tmp_path / kind.index).write_text(content)
    with pytest.raises(EngineStartError, match=re.escape(kind.index)):
        load(str(tmp_path), take_all)


class Intruder:
    """An object whose unpickling runs code: it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._folder),)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_that_would_run_code_is_refused_and_does_not(tmp_path: Path, zipped: bool) -> None:
    made = tmp_path / "made"
    torch.save(
        {**tensors(), "c.weight": Intruder(made)},
        tmp_path / "pytorch_model.bin",
        _use_new_zipfile_serialization=zipped,
    )
    with pytest.raises(
        EngineStartError,
        match=r"pytorch_model\.bin holds a Python object \(\w+\.mkdir\) beside tensors, which",
    ) as caught:
        load(str(tmp_path), take_all)
    assert "\n" not in str(caught.value) and not made.exists()


@pytest.mark.parametrize("content", [[1], {"state_dict": {}}, {3: torch.ones(1)}], ids=str)
def test_a_file_of_other_things_is_refused(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(EngineStartError, match="not hold a dict of tensors by their names alone"):
        load(str(tmp_path), take_all)


def test_files_of_old_torch_versions_and_parameters_are_read(tmp_path: Path) -> None:
    """Such files are no zip archives, and some hold parameters in place of tensors."""
    parameters = {name: torch.nn.Parameter(value) for name, value in tensors().items()}
    torch.save(parameters, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with opened(str(tmp_path)) as weights:
        found = weights.get("a.weight", (6, 4))
        assert torch.equal(found, tensors()["a.weight"]) and not found.requires_grad
        found.copy_(torch.zeros(6, 4))


def test_other_files_of_torch_beside_the_model_are_not_read(tmp_path: Path) -> None:
    folder = write(tmp_path, TorchWeights)
    torch.save(Intruder(tmp_path / "made"), tmp_path / "training_args.bin")
    load(folder, take_all)


def test_the_rows_of_a_rank_do_not_keep_the_whole_tensor(tmp_path: Path) -> None:
    with opened(write(tmp_path, TorchWeights)) as weights:
        rows = weights.get("a.weight", (6, 4), rows=range(2, 3))
    assert rows.untyped_storage().nbytes() == rows.nbytes


@pytest.mark.parametrize("kind", KINDS)
def test_equal_tensors_are_found(tmp_path: Path, kind: Kind) -> None:
    one = torch.rand(5000, 2)
    found = {"a": one, "b": one.clone(), "c": one + (torch.arange(5000) == 4999)[:, None]}
    save(kind, found, tmp_path / kind.whole_file)
    with opened(str(tmp_path)) as weights:
        assert weights.are_equal("a", "b") and not weights.are_equal("a", "c")


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


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3000, 2064, dtype=torch.bfloat16),
        torch.zeros(3000, 2064, dtype=torch.bfloat16)[7:, 1032:],
        torch.zeros(9 << 20, dtype=torch.int8),
        torch.zeros(3, 700, 1000),
    ],
    ids=["whole", "part", "vector", "three dimensions"],
)
def test_pieces_for_a_gpu_cover_a_tensor_once(tensor: Tensor) -> None:
    """Cover them without a GPU: each has room in a buffer, and together they are the tensor."""
    lines = lines_of(tensor)
    assert lines is not None and lines.data_ptr() == tensor.data_ptr()
    for piece in pieces_of(lines):
        assert 0 < lines[piece].nbytes <= 8 << 20
        lines[piece].add_(1)
    ones = tensor.contiguous().view(
        {1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.itemsize]
    )
    assert bool((ones == 1).all())


def test_small_tensors_and_long_lines_are_not_cut() -> None:
    assert lines_of(torch.zeros(1000)) is None
    assert lines_of(torch.zeros(2, 6 << 20)[:, 1:]) is None
