"""The files that are fetched of a model on the hub."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.model.model_spec import TOKENIZER_FILES, resolve_model_path

SMALL = ["config.json", "tokenizer.model", "chat_template.jinja", "vocab.txt"]
OTHERS = ["training_args.bin", "optimizer.bin", "rust_model.ot", "README.md"]


class Hub:
    """A hub with one repository, whose files are fetched into a folder."""

    def __init__(self, folder: Path, files: list[str]) -> None:
        self.folder, self.files = folder, files

    def __call__(self, name: str, *, revision: str | None = None, allow_patterns: list[str]) -> str:
        if revision == "nowhere":
            raise ValueError("no such revision\nmore lines")
        for file in self.files:
            if any(fnmatch(file, pattern) for pattern in allow_patterns):
                (self.folder / file).touch()
        return str(self.folder)

    @property
    def fetched(self) -> list[str]:
        return sorted(file.name for file in self.folder.iterdir())


@pytest.mark.parametrize(
    ("weights", "fetched"),
    [
        (["model.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        (["pytorch_model.bin"], ["pytorch_model.bin"]),
        (
            ["pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"],
            ["pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"],
        ),
    ],
    ids=["both kinds", "one file of torch", "shards of torch"],
)
def test_files_of_torch_are_fetched_where_there_are_no_safetensors(
    weights: list[str], fetched: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub: Any = Hub(tmp_path, [*SMALL, *OTHERS, *weights])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    assert resolve_model_path("owner/name") == str(tmp_path)
    assert hub.fetched == sorted([*SMALL, *fetched])


def test_of_a_tokenizer_no_weights_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub: Any = Hub(tmp_path, [*SMALL, *OTHERS, "model.safetensors", "pytorch_model.bin"])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    resolve_model_path("owner/name", files=TOKENIZER_FILES)
    assert hub.fetched == sorted(SMALL)


def test_a_hub_s_refusal_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub: Any = Hub(tmp_path, SMALL)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    with pytest.raises(
        EngineStartError, match="could not be fetched from a hub: no such revi"
    ) as e:
        resolve_model_path("owner/name", "nowhere")
    assert "\n" not in str(e.value)
