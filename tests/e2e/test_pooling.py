"""Vectors of prompts equal those that transformers' own states give, in float32 on the CPU.

They do so batched, in chunks, preempted, with cached prefixes, and over several ranks and stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sidestep import DEFAULT_MODEL, LLM, PoolingParams, PoolingRequestOutput, ValidationError
from tests.e2e.conftest import write_tokenizer
from tests.e2e.models import RandomModel, random_prompts
from tests.e2e.pooling_models import (
    Vectors,
    logits,
    next_tokens,
    normalized,
    pooled,
    states,
    write_bare,
    write_classifier,
    write_modules,
)

SMALL: dict[str, Any] = {
    "max_num_batched_tokens": 24,
    "max_num_seqs": 5,
    "block_size": 8,
    "num_kv_blocks": 13,
    "max_model_len": 96,
}
"""Options so small that prompts come in chunks, and wait for one another."""


def engine(path: str, **options: Any) -> LLM:
    given = {"device": "cpu", "dtype": "float32", "cpu_threads": 1, "runner": "pooling", **options}
    return LLM(path, **given)


def close(found: Sequence[PoolingRequestOutput[Any]], expected: Vectors) -> None:
    assert len(found) == len(expected)
    for output, wanted in zip(found, expected, strict=True):
        (got,) = (np.array(getattr(output.outputs, name)) for name in output.outputs.__slots__)
        assert got.shape == wanted.shape and np.abs(got - wanted).max() < 1e-5


@pytest.mark.parametrize("kind", ["last", "mean", "cls"])
@pytest.mark.parametrize("options", [{}, SMALL], ids=str)
def test_embeddings_equal_the_states_of_transformers(
    kind: str, options: dict[str, Any], random_model: RandomModel
) -> None:
    """Run all prompts twice: the second time their prefixes are cached, where that may be used."""
    path, _ = random_model("qwen3-tied")
    prompts = random_prompts(14, 331)
    expected = normalized(pooled(states(path, prompts), kind))
    with engine(path, pooler_config={"pooling_type": kind.upper()}, **options) as llm:
        close(llm.embed(prompts, use_tqdm=False), expected)
        close(llm.embed(prompts, use_tqdm=False), expected)
        stats = llm.get_stats()
        if kind != "last" or not options:  # the small cache may have lost the prefixes
            assert (stats["prefix_cache_hits"] > 0) is (kind == "last")
        assert stats["num_running"] == stats["num_waiting"] == stats["kv_cache_usage"] == 0


@pytest.mark.parametrize(
    ("family", "kind", "options"),
    [
        ("llama-mha-tied", "last", {"tensor_parallel_size": 2}),
        ("qwen2", "mean", {"pipeline_parallel_size": 2, **SMALL}),
        ("qwen2-window", "cls", {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
    ],
    ids=str,
)
def test_ranks_and_stages_make_the_same_embeddings(
    family: str, kind: str, options: dict[str, Any], random_model: RandomModel
) -> None:
    path, _ = random_model(family)
    prompts = random_prompts(9, 331)
    expected = normalized(pooled(states(path, prompts), kind))
    with engine(path, pooler_config={"pooling_type": kind}, **options) as llm:
        close(llm.embed(prompts, use_tqdm=False), expected)


@pytest.mark.parametrize(
    ("labels", "options"),
    [(1, {"tensor_parallel_size": 2}), (3, {"pipeline_parallel_size": 2, **SMALL})],
    ids=str,
)
def test_heads_equal_those_of_transformers(
    labels: int, options: dict[str, Any], tmp_path: Path
) -> None:
    """Also check that such a model pools without the option runner."""
    path = write_classifier("qwen3-tied", write_tokenizer(tmp_path), labels)
    prompts = random_prompts(9, 331)
    raw = logits(path, prompts)
    probs = [1 / (1 + np.exp(-x)) if labels == 1 else np.exp(x) / np.exp(x).sum() for x in raw]
    with engine(path, **{**options, "runner": "auto"}) as llm:
        close(llm.reward(prompts, use_tqdm=False), raw)
        close(llm.classify(prompts, use_tqdm=False), probs)
        with pytest.raises(ValidationError, match="'embed' needs another model"):
            llm.embed(prompts)


@pytest.mark.parametrize("normalize", [False, True])
def test_a_folder_of_sentence_transformers_says_how_to_pool(
    normalize: bool, tmp_path: Path
) -> None:
    path = write_bare("llama-gqa", write_tokenizer(tmp_path))
    write_modules(tmp_path, "pooling_mode_mean_tokens", normalize=normalize)
    prompts = random_prompts(5, 331)
    expected = pooled(states(path, prompts), "mean")
    with engine(path, runner="auto") as llm:
        close(llm.embed(prompts, use_tqdm=False), normalized(expected) if normalize else expected)
        params = PoolingParams(normalize=not normalize)
        other = llm.embed(prompts, use_tqdm=False, pooling_params=params)
        close(other, expected if normalize else normalized(expected))


def test_the_bundled_model_embeds_texts_and_scores_pairs() -> None:
    texts = ["def get_name(", "import os\n" * 20, "def get_name(self"]
    with engine(DEFAULT_MODEL, hf_overrides={"is_matryoshka": True}) as llm:
        outputs = llm.embed(texts, use_tqdm=False)
        expected = pooled(states(DEFAULT_MODEL, [o.prompt_token_ids for o in outputs]), "last")
        close(outputs, normalized(expected))
        short = llm.embed(texts, use_tqdm=False, pooling_params=PoolingParams(dimensions=16))
        close(short, normalized([vector[:16] for vector in expected]))
        scores = [s.outputs.score for s in llm.score(texts[0], texts[1:], use_tqdm=False)]
        units = normalized(expected)
        assert scores == pytest.approx([units[0] @ units[1], units[0] @ units[2]], abs=1e-5)


def test_a_reranker_is_made_of_two_rows_of_a_head_for_text() -> None:
    """The score is the probability of the second token among the two."""
    no, yes = "def", "import"
    overrides = {
        "architectures": ["LlamaForSequenceClassification"],
        "classifier_from_token": [no, yes],
        "is_original_qwen3_reranker": True,
    }
    texts = ["x = 1\n", "import os\n" * 9, ")\n\n\n"]
    with engine(DEFAULT_MODEL, hf_overrides=overrides) as llm:
        found = llm.classify(texts, use_tqdm=False)
        ids = [llm.get_tokenizer().encode(text) for text in (no, yes)]
        pair = llm.score(texts[0], texts[1], use_tqdm=False)
        joined = llm.classify(texts[0] + texts[1], use_tqdm=False)
    chances = next_tokens(DEFAULT_MODEL, [o.prompt_token_ids for o in found], [i for (i,) in ids])
    close(found, [chance[1:] for chance in chances])
    assert pair[0].prompt_token_ids == joined[0].prompt_token_ids
    assert [pair[0].outputs.score] == joined[0].outputs.probs


def test_a_prompt_may_be_as_long_as_the_model(random_model: RandomModel) -> None:
    path, _ = random_model("llama-gqa")
    with engine(path, max_model_len=64) as llm:
        (output,) = llm.embed([5] * 64, use_tqdm=False)
        assert len(output.prompt_token_ids) == 64
        with pytest.raises(ValidationError, match="has 65 tokens; that is more than"):
            llm.embed([5] * 65, use_tqdm=False)
