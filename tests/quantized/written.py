"""Small models whose matrices are quantized, and the same models with the decoded matrices."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.e2e.models import write_model

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "head_dim": 16,
    "num_hidden_layers": 2,
}
"""Sizes that words and groups of 32 divide, also among two ranks."""


class Encoded(NamedTuple):
    """A matrix in a method's form."""

    tensors: dict[str, Tensor]
    """By the ends of their names."""
    numbers: Tensor
    """The numbers that they stand for, float32 [N, K]."""


Encoder = Callable[[str, Tensor], Encoded | None]
"""Encodes a matrix of this name, without ".weight"; returns None for one that stays plain."""


@dataclass(frozen=True)
class Case:
    """A form of a method's files."""

    config: dict[str, Any]
    """The fields that the files state."""
    encode: Encoder
    family: str = "llama-gqa"
    changes: dict[str, Any] = field(default_factory=lambda: SIZES)
    """Fields of the family's configuration."""
    ranks: tuple[int, ...] = (1, 2)
    """Numbers of ranks that can share it."""
    config_file: str = "config.json"
    """Where the configuration is: there, or alone in a file of an older tool."""
    rtol: float = 1e-5
    """How much a decoder's numbers may differ: a minimum is rounded apart from its numbers."""
    size_is_stated: bool = True
    """Whether the configuration alone says how many bytes a matrix takes."""


class Written(NamedTuple):
    """Folders of two models with the same numbers."""

    quantized: str
    plain: str


def write(case: Case, folder: Path) -> Written:
    """Write a model in the case's form, and plain with the decoded matrices in float32."""
    source = Path(_plain(case.family, json.dumps(case.changes)))
    config = json.loads((source / "config.json").read_text())
    whole = load_file(source / "model.safetensors")
    quantized, plain = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in whole.items():
        own = name.removesuffix(".weight")
        is_matrix = own.rpartition(".")[2].endswith("proj") or own == "lm_head"
        encoded = case.encode(own, tensor) if is_matrix and tensor.dim() == 2 else None
        if encoded is None:
            quantized[name] = plain[name] = tensor
        else:
            quantized |= {f"{own}.{end}": one for end, one in encoded.tensors.items()}
            plain[name] = encoded.numbers.contiguous()
    paths = []
    for kind, tensors in (("quantized", quantized), ("plain", plain)):
        place = folder / kind
        place.mkdir(parents=True)
        save_file({k: v.contiguous() for k, v in tensors.items()}, place / "model.safetensors")
        (place / "config.json").write_text(json.dumps(config))
        paths.append(str(place))
    state(folder / "quantized", case.config, case.config_file)
    return Written(*paths)


def state(folder: Path, quantization: dict[str, Any], file: str = "config.json") -> None:
    """Write what a folder's files state of their quantization."""
    place = folder / file
    if file == "config.json":
        whole = json.loads(place.read_text())
        place.write_text(json.dumps({**whole, "quantization_config": quantization}))
    else:
        place.write_text(json.dumps(quantization))


@cache
def _plain(family: str, changes: str) -> str:
    """Return the folder of a plain model, which is written once a process. changes: as JSON."""
    return write_model(family, Path(mkdtemp()), **json.loads(changes))


def seeded(name: str) -> torch.Generator:
    """Return a source of random numbers for a matrix."""
    return torch.Generator().manual_seed(sum(map(ord, name)))


def only_layers(encode: Encoder) -> Encoder:
    """Return an encoder that leaves the output head plain."""
    return lambda name, weight: None if name == "lm_head" else encode(name, weight)
