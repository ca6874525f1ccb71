"""Beam search finds the same tokens as transformers, in float32 on the CPU."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, PreTrainedModel

from sidestep import DEFAULT_MODEL, LLM, BeamSearchParams, SamplingParams
from tests.e2e.conftest import write_tokenizer
from tests.e2e.engines import Engines
from tests.e2e.models import (
    RandomModel,
    load_reference,
    random_prompts,
    reference_tokens,
    write_model,
)


def reference_beams(
    model: PreTrainedModel, prompt: Sequence[int], params: BeamSearchParams, eos: Sequence[int] = ()
) -> list[tuple[list[int], float]]:
    """Return the sequences that transformers finds: tokens after the prompt, and scores."""
    return _reference_beams(model, tuple(prompt), params, tuple(eos))


@cache
def _reference_beams(
    model: PreTrainedModel, prompt: tuple[int, ...], params: BeamSearchParams, eos: tuple[int, ...]
) -> list[tuple[list[int], float]]:
    ids = torch.tensor([prompt])
    generate: Any = model.generate  # without types
    out = generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        max_new_tokens=params.max_tokens,
        pad_token_id=-1,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=list(eos) or None,
        return_dict_in_generate=True,
        output_scores=True,
    )
    tokens = [
        [token for token in row if token >= 0] for row in out.sequences[:, len(prompt) :].tolist()
    ]
    scores = out.sequences_scores.tolist() if params.beam_width > 1 else [0.0]
    return list(zip(tokens, scores, strict=True))


def is_clear(beams: Sequence[tuple[list[int], float]]) -> bool:
    """Return whether all scores are far enough apart.

    Otherwise the rounding of a CPU's products decides which one is better.
    """
    return all(better - worse > 1e-5 * abs(better) for (_, better), (_, worse) in pairwise(beams))


def check(
    llm: LLM,
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    params: BeamSearchParams,
    eos: Sequence[int] = (),
) -> None:
    num_clear = 0
    for prompt, output in zip(prompts, llm.beam_search(prompts, params), strict=True):
        expected = reference_beams(model, prompt, params, () if params.ignore_eos else eos)
        if not is_clear(expected):
            continue
        num_clear += 1
        assert [s.tokens[len(prompt) :] for s in output.sequences] == [
            tokens for tokens, _ in expected
        ]
        assert [s.tokens[: len(prompt)] for s in output.sequences] == [prompt] * params.beam_width
        if params.beam_width > 1:
            scores = [score for _, score in expected]
            assert [s.score for s in output.sequences] == pytest.approx(scores, rel=1e-5, abs=1e-4)
    assert num_clear >= len(prompts) / 2


@pytest.mark.parametrize("family", ["llama-gqa", "mistral-window"])
def test_random_models_equal_transformers(
    family: str, random_model: RandomModel, engines: Engines
) -> None:
    path, model = random_model(family)
    for width in (1, 2, 5):
        check(
            engines.get(path),
            model,
            random_prompts(6, 331),
            BeamSearchParams(beam_width=width, max_tokens=17),
        )


@pytest.fixture(scope="module", params=[1, 3])
def unsure(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, PreTrainedModel, list[int]]:
    """Return a model that often ends a sequence: its folder, the model, and the ending tokens.

    It ends a sequence by one token or by three.
    """
    folder = write_tokenizer(tmp_path_factory.mktemp("unsure"))
    path = write_model("llama-gqa", folder)
    make_unsure(folder)
    model = load_reference(path)
    eos = sorted(
        {tokens[3] for tokens in reference_tokens(model, random_prompts(5, 331), [4] * 5)}
    )[: request.param]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": eos}))
    return path, model, eos


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_ends_and_penalties_equal_transformers(
    early_stopping: Any, unsure: tuple[str, PreTrainedModel, list[int]], engines: Engines
) -> None:
    path, model, eos = unsure
    for penalty in (-1.0, 0.0, 3.0):
        check(
            engines.get(path),
            model,
            random_prompts(4, 331),
            BeamSearchParams(
                beam_width=4,
                max_tokens=25,
                length_penalty=penalty,
                early_stopping=early_stopping,
                include_stop_str_in_output=True,
            ),
            eos,
        )


def make_unsure(folder: Path) -> None:
    """Make a model's tokens almost equally probable.

    Ends of sequence are then among the best continuations.
    """
    (weights,) = folder.glob("*.safetensors")
    tensors = load_file(weights)
    tensors["lm_head.weight"] *= 0.02
    save_file(tensors, weights, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": False, "enable_prefix_caching": False},
        {"tensor_parallel_size": 2},
        {
            "max_num_batched_tokens": 48,
            "max_num_seqs": 12,
            "block_size": 8,
            "num_kv_blocks": 36,
            "max_model_len": 200,
        },
    ],
    ids=str,
)
def test_searches_do_not_depend_on_how_they_are_run(
    options: dict[str, Any], random_model: RandomModel, engines: Engines
) -> None:
    path, model = random_model("llama-gqa")
    llm = engines.get(path, **options)
    check(llm, model, random_prompts(6, 331), BeamSearchParams(beam_width=4, max_tokens=20))
    assert llm.get_stats()["kv_cache_usage"] == 0
    if "num_kv_blocks" in options:
        assert llm.get_stats()["num_preemptions"] > 0


def test_the_bundled_model_equals_transformers(engines: Engines) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEFAULT_MODEL)
    prompts = [
        tokenizer(text)["input_ids"]
        for text in ("def get_name(", "import os\n\ndef f(path):", "for i in")
    ]
    llm, model = engines.get(), load_reference(DEFAULT_MODEL)
    eos = model.generation_config.eos_token_id
    ends = eos if isinstance(eos, list) else [eos]
    for params in (
        BeamSearchParams(beam_width=4, max_tokens=30, include_stop_str_in_output=True),
        BeamSearchParams(
            beam_width=3,
            max_tokens=24,
            length_penalty=0.0,
            early_stopping="never",
            include_stop_str_in_output=True,
        ),
    ):
        check(llm, model, prompts, params, ends)
    (output,) = llm.beam_search(["def get_name("], BeamSearchParams(beam_width=2, max_tokens=8))
    assert output.sequences[0].text == tokenizer.decode(
        output.sequences[0].tokens[len(prompts[0]) :]
    )


def test_plain_requests_beside_a_search_do_not_change(
    random_model: RandomModel, engines: Engines
) -> None:
    path, model = random_model("llama-gqa")
    prompts = random_prompts(6, 331)
    params = BeamSearchParams(beam_width=4, max_tokens=20)
    llm = engines.get(path)
    mixed = llm._call(mix(llm, prompts, params))
    assert mixed[0] == reference_tokens(model, prompts[:3], [30] * 3)
    expected = [reference_beams(model, p, params) for p in prompts[3:]]
    clear = [i for i, beams in enumerate(expected) if is_clear(beams)]
    assert len(clear) >= 2
    assert [mixed[1][i] for i in clear] == [[tokens for tokens, _ in expected[i]] for i in clear]


async def mix(llm: LLM, prompts: Sequence[list[int]], params: BeamSearchParams) -> tuple[Any, Any]:
    """Run plain requests and searches at once."""
    engine = llm._llm

    async def greedy(prompt: list[int]) -> list[int]:
        async for output in engine.generate(
            prompt, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        ):
            pass
        return output.outputs[0].token_ids

    async def search(prompt: list[int]) -> list[list[int]]:
        output = await engine.beam_search(prompt, params)
        return [s.tokens[len(prompt) :] for s in output.sequences]

    plain = [asyncio.create_task(greedy(p)) for p in prompts[:3]]
    beams = [asyncio.create_task(search(p)) for p in prompts[3:]]
    return await asyncio.gather(*plain), await asyncio.gather(*beams)
