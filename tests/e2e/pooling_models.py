"""Small random models that pool, and what transformers and torch make of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModel, AutoModelForSequenceClassification

from tests.e2e.models import FAMILIES, load_reference, write_model

Vectors = list[npt.NDArray[Any]]


def write_classifier(family: str, folder: Path, labels: int, **changes: Any) -> str:
    """Write a random model with a classification head, and return its folder."""
    torch.manual_seed(7)
    config = FAMILIES[family]()
    config.update({"num_labels": labels, **changes})
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(0, 0.25)
    model.save_pretrained(folder)
    return str(folder)


def write_bare(family: str, folder: Path, **changes: Any) -> str:
    """Write a random model without a head, whose weights' names have no beginning 'model.'."""
    with_head = write_model(family, folder / "with_head", **changes)
    AutoModel.from_pretrained(with_head, dtype=torch.float32).save_pretrained(folder)
    return str(folder)


def write_modules(folder: Path, pooling: str, *, normalize: bool) -> None:
    """Write the files by which sentence-transformers knows how to pool."""
    modules = ["Transformer", "Pooling", *["Normalize"] * normalize]
    (folder / "modules.json").write_text(
        json.dumps(
            [
                {"idx": i, "path": f"{i}_{name}" * (i > 0), "type": f"sentence.models.{name}"}
                for i, name in enumerate(modules)
            ]
        )
    )
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 48, pooling: True, "include_prompt": True})
    )


@torch.inference_mode()
def states(path: str, prompts: Sequence[list[int]]) -> Vectors:
    """Return the hidden states of each prompt, [tokens, D], by transformers."""
    model = AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return [model(torch.tensor([p])).last_hidden_state[0].numpy() for p in prompts]


@torch.inference_mode()
def logits(path: str, prompts: Sequence[list[int]]) -> Vectors:
    """Return the outputs of the head for each prompt, by transformers."""
    model = AutoModelForSequenceClassification.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    model.config.pad_token_id = None
    return [model(torch.tensor([prompt])).logits[0].numpy() for prompt in prompts]


@torch.inference_mode()
def next_tokens(path: str, prompts: Sequence[list[int]], tokens: list[int]) -> Vectors:
    """Return the probabilities of some tokens, among them alone, to follow each prompt."""
    model = load_reference(path)
    found = [model(torch.tensor([prompt])).logits[0, -1, tokens] for prompt in prompts]
    return [one.softmax(0).numpy() for one in found]


def pooled(found: Vectors, kind: str) -> Vectors:
    """Return the vector of each prompt's states."""
    return [
        x[-1] if kind == "last" else x[0] if kind == "cls" else x.mean(0, dtype=np.float64)
        for x in found
    ]


def normalized(found: Vectors) -> Vectors:
    return [x / np.linalg.norm(x) for x in found]
