"""A family of models from an installed package (examples/outside_model).

It runs like any other family.
"""

from __future__ import annotations

import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import OlmoConfig

from sidestep import LLM, EngineArgs, EngineStartError, SamplingParams
from tests.e2e.models import (
    COMMON,
    FAMILIES,
    load_reference,
    random_prompts,
    reference_tokens,
    write_model,
)

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "outside_model"
PACKAGE = "sidestep_olmo"


def install(site: Path, entry_points: dict[str, dict[str, str]] | None = None) -> None:
    """Install the example as pip does, into a folder that is on the path."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    shutil.copytree(EXAMPLE / PACKAGE, site / PACKAGE)
    info = site / f"{PACKAGE}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    lines = [
        line
        for group, points in (entry_points or project["entry-points"]).items()
        for line in (f"[{group}]", *(f"{name} = {target}" for name, target in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))


@pytest.fixture
def site(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """Yield a folder on the path, and forget its modules after the test."""
    folder = tmp_path_factory.mktemp("site")
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


def olmo(**changes: Any) -> OlmoConfig:
    common = {name: value for name, value in COMMON.items() if name != "rms_norm_eps"}
    return OlmoConfig(**{**common, **changes})


@pytest.mark.parametrize(("ranks", "tied"), [(1, True), (2, False)])
def test_an_installed_package_s_model_equals_transformers(
    ranks: int, tied: bool, site: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, "olmo", lambda: olmo(tie_word_embeddings=tied))
    path = write_model("olmo", model_folder)
    with pytest.raises(
        EngineStartError, match="OlmoForCausalLM is not supported; supported are .*Llama"
    ):
        EngineArgs(model=path).create_engine_config()
    install(site)
    prompts = random_prompts(6, 331)
    expected = reference_tokens(load_reference(path), prompts, [12] * len(prompts))
    with LLM(path, device="cpu", dtype="float32", cpu_threads=1, tensor_parallel_size=ranks) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        got = [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]
    assert got == expected
    assert f"{PACKAGE}.spec" in sys.modules and f"{PACKAGE}.model" not in sys.modules, (
        "it would bring torch"
    )


@pytest.mark.parametrize(
    ("models", "specs", "words"),
    [
        (
            {"OlmoForCausalLM": "nowhere.model:Olmo"},
            {},
            "model: 'nowhere.model:Olmo', the class of OlmoForCausalLM, cannot be imported",
        ),
        (
            {"OlmoForCausalLM": f"{PACKAGE}.model:OlmoForCausalLM"},
            {"OlmoForCausalLM": f"{PACKAGE}.spec:nobody"},
            f"model: '{PACKAGE}.spec:nobody', which reads the config of OlmoForCausalLM, cannot",
        ),
    ],
)
def test_what_a_package_registers_wrongly_is_told_in_one_line(
    models: dict[str, str], specs: dict[str, str], words: str, site: Path, model_folder: Path
) -> None:
    olmo(architectures=["OlmoForCausalLM"]).save_pretrained(model_folder)
    install(site, {"sidestep.models": models, "sidestep.model_specs": specs})
    with pytest.raises(EngineStartError) as caught:
        LLM(str(model_folder), device="cpu", load_format="dummy")
    assert words in str(caught.value) and "\n" not in str(caught.value)
