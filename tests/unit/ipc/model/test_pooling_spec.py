"""The vectors of a model in an engine that pools, read from its folder and the options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sidestep import PoolingParams, ValidationError
from sidestep.ipc.model.pooling_spec import PoolingSpec
from tests.unit.ipc.model.test_model_config import problem, read

HEAD = {"architectures": ["Qwen3ForSequenceClassification"]}


def pooling(folder: Path, changes: dict[str, Any] | None = None, **options: Any) -> PoolingSpec:
    found = read(folder, changes, skip_tokenizer_init=True, **options).spec.pooling
    assert found is not None
    return found


def write(folder: Path, *modules: str, **pooler: Any) -> None:
    """Write the files of sentence-transformers."""
    (folder / "modules.json").write_text(
        json.dumps([{"type": f"x.{name}", "path": name} for name in modules])
    )
    (folder / "Pooling").mkdir()
    (folder / "Pooling" / "config.json").write_text(json.dumps(pooler))


@pytest.mark.parametrize(
    ("changes", "runner", "task"),
    [
        ({}, "auto", None),
        ({}, "generate", None),
        ({}, "pooling", "embed"),
        (HEAD, "auto", "classify"),
        ({"architectures": ["Qwen3Model"]}, "auto", "embed"),
    ],
    ids=str,
)
def test_the_runner_follows_from_the_architecture(
    changes: dict[str, Any], runner: str, task: str | None, tmp_path: Path
) -> None:
    spec = read(tmp_path, changes, skip_tokenizer_init=True, runner=runner).spec.pooling
    assert (spec and spec.task) == task


def test_a_model_that_says_nothing_embeds_by_its_last_token(tmp_path: Path) -> None:
    spec = pooling(tmp_path, runner="pooling")
    assert (spec.pooling, spec.activation, spec.width) == ("last", "normalize", 64)
    assert not spec.is_matryoshka


@pytest.mark.parametrize(
    ("modules", "pooler", "expected"),
    [
        (["Transformer", "Pooling"], {"pooling_mode_cls_token": True}, ("cls", "none")),
        (["Transformer", "Pooling"], {"pooling_mode": "mean"}, ("mean", "none")),
        (
            ["Transformer", "Pooling", "Normalize"],
            {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False},
            ("last", "normalize"),
        ),
    ],
    ids=str,
)
def test_sentence_transformers_say_how_to_pool(
    modules: list[str], pooler: dict[str, Any], expected: tuple[str, str], tmp_path: Path
) -> None:
    write(tmp_path, *modules, **pooler)
    spec = pooling(tmp_path)
    assert (spec.pooling, spec.activation) == expected
    other = pooling(tmp_path, pooler_config={"pooling_type": "CLS", "use_activation": True})
    assert (other.pooling, other.activation) == ("cls", "normalize")
    generating = read(tmp_path, skip_tokenizer_init=True, runner="generate")
    assert generating.spec.pooling is None


@pytest.mark.parametrize(
    ("modules", "pooler", "says"),
    [
        (["Transformer", "Pooling", "Dense"], {"pooling_mode_cls_token": True}, "'Dense'"),
        (["Pooling"], {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        (["Pooling"], {"pooling_mode": ["mean", "cls"]}, "mean, cls"),
        (["Pooling"], {"pooling_mode": "cls", "include_prompt": False}, "include_prompt"),
    ],
    ids=str,
)
def test_other_modules_are_refused(
    modules: list[str], pooler: dict[str, Any], says: str, tmp_path: Path
) -> None:
    write(tmp_path, *modules, **pooler)
    assert says in problem(tmp_path, skip_tokenizer_init=True)


@pytest.mark.parametrize(
    ("changes", "width", "activation"),
    [
        ({}, 2, "softmax"),
        ({"id2label": {"0": "relevant"}}, 1, "sigmoid"),
        ({"num_labels": 4, "problem_type": "multi_label_classification"}, 4, "sigmoid"),
        ({"num_labels": 1, "problem_type": "regression"}, 1, "none"),
        (
            {"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.Identity"}},
            1,
            "none",
        ),
    ],
    ids=str,
)
def test_a_head_has_labels_and_a_function(
    changes: dict[str, Any], width: int, activation: str, tmp_path: Path
) -> None:
    spec = pooling(tmp_path, {**HEAD, **changes})
    assert (spec.width, spec.activation, len(spec.labels)) == (width, activation, width)


@pytest.mark.parametrize(
    ("changes", "options", "says"),
    [
        (HEAD, {"runner": "generate"}, "runner: Qwen3ForSequenceClassification has no head"),
        ({}, {"pooler_config": {"pooling_type": "MEAN"}}, "pooler_config: has a meaning only"),
        ({}, {"runner": "pooling", "pooler_config": {"pooling_type": "STEP"}}, "LAST, MEAN or CLS"),
        ({}, {"runner": "pooling", "pooler_config": {"softmax": True}}, "'softmax' is not a field"),
        ({}, {"runner": "score"}, "runner: 'score' is not one of"),
        ({"matryoshka_dimensions": "8"}, {"runner": "pooling"}, "must be a list of lengths"),
        ({**HEAD, "classifier_from_token": ["no"]}, {}, "must name two tokens"),
        (
            {},
            {"runner": "pooling", "speculative_config": {"method": "ngram"}},
            "speculative_config: has no meaning with runner 'pooling'",
        ),
    ],
    ids=str,
)
def test_a_wrong_value_is_named(
    changes: dict[str, Any], options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    assert says in problem(tmp_path, changes, skip_tokenizer_init=True, **options)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"dimensions": 0}, "dimensions: must be a whole number"),
        ({"normalize": 1}, "normalize: must be True or False"),
        ({"normalize": True, "use_activation": True}, "normalize: means the same"),
        ({"task": "token_embed"}, "task: must be 'embed' or 'classify'"),
        ({"dimension": 5}, "dimension: is not a field of PoolingParams; did you mean dimensions"),
        ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens: prompts are never cut"),
    ],
    ids=str,
)
def test_a_wrong_parameter_is_named(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        PoolingParams(**fields)


def test_vllms_older_names_of_parameters_are_taken() -> None:
    given: dict[str, Any] = {"softmax": False}
    assert PoolingParams(**given).activation is False
    assert PoolingParams(normalize=True).clone(dimensions=5).activation is True
