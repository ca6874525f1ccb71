"""A model with recurrent layers as users run it: prefixes, choices, searches, grammars, sleep."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sidestep import LLM, BeamSearchParams, SamplingParams
from tests.e2e.models import RandomModel, random_prompts, reference_tokens

BLOCK = 8


@pytest.fixture(scope="module")
def llm(random_model: RandomModel) -> Iterator[LLM]:
    """Return an engine whose prompts come in chunks."""
    path, _ = random_model("qwen3.5")
    with LLM(
        path,
        device="cpu",
        dtype="float32",
        cpu_threads=1,
        block_size=BLOCK,
        max_num_seqs=6,
        max_num_batched_tokens=48,
        max_model_len=300,
    ) as made:
        yield made


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def test_a_chat_finds_its_earlier_turns(llm: LLM, random_model: RandomModel) -> None:
    _, model = random_model("qwen3.5")
    prompt = random_prompts(1, 331, longest=90, seed=11)[0] + list(range(60))
    for _ in range(3):
        (out,) = llm.generate([prompt], greedy(9), use_tqdm=False)
        assert [out.outputs[0].token_ids] == reference_tokens(model, [prompt], [9])
        found = out.num_cached_tokens
        prompt = [*prompt, *out.outputs[0].token_ids, 5, 6, 7]
    before = len(prompt) - 2 * 12
    assert found == (before - 1) // BLOCK * BLOCK, "all of the turn before but its last block"


def test_choices_equal_those_of_requests_of_their_own(llm: LLM) -> None:
    prompts = random_prompts(3, 331, longest=80, seed=5)
    sampled = SamplingParams(temperature=1.0, seed=3, max_tokens=8, ignore_eos=True, n=3)
    together = llm.generate(prompts, sampled, use_tqdm=False)
    for prompt, out in zip(prompts, together, strict=True):
        for index, choice in enumerate(out.outputs):
            alone = SamplingParams(
                temperature=1.0,
                seed=sampled.for_choice(index).seed,
                max_tokens=8,
                ignore_eos=True,
            )
            (again,) = llm.generate([prompt], alone, use_tqdm=False)
            assert choice.token_ids == again.outputs[0].token_ids


def test_each_beam_has_the_state_of_its_own_tokens(llm: LLM) -> None:
    """The model, given a beam as a prompt, agrees on the beam's probability."""
    prompts = random_prompts(3, 331, longest=80, seed=5)
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    found = llm.beam_search([{"prompt_token_ids": prompt} for prompt in prompts], params)
    scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
    for prompt, search in zip(prompts, found, strict=True):
        assert len({tuple(beam.tokens) for beam in search.sequences}) == 3
        for beam in search.sequences:
            (out,) = llm.generate([beam.tokens], scored, use_tqdm=False)
            assert out.prompt_logprobs is not None
            behind = zip(beam.tokens, out.prompt_logprobs, strict=True)
            logprobs = [found[token].logprob for token, found in behind if found][len(prompt) - 1 :]
            assert len(logprobs) == 6
            assert beam.cum_logprob == pytest.approx(sum(logprobs), abs=1e-3)


def test_tokens_after_a_sleep_are_the_same(llm: LLM) -> None:
    prompts = random_prompts(4, 331, longest=60, seed=8)
    before = llm.generate(prompts, greedy(6), use_tqdm=False)
    llm.sleep(level=2)
    llm.wake_up()
    after = llm.generate(prompts, greedy(6), use_tqdm=False)
    assert [o.outputs[0].token_ids for o in after] == [o.outputs[0].token_ids for o in before]
    assert {out.num_cached_tokens for out in after} == {0}


@pytest.fixture(scope="module")
def staged(random_model: RandomModel) -> Iterator[LLM]:
    """Return an engine of two stages that verifies drafts."""
    path, _ = random_model("qwen3.5")
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    with LLM(
        path,
        device="cpu",
        dtype="float32",
        cpu_threads=1,
        block_size=BLOCK,
        max_num_seqs=4,
        max_model_len=300,
        pipeline_parallel_size=2,
        speculative_config={**config, "adaptive": False},
    ) as made:
        yield made


def test_each_stage_goes_on_from_the_state_of_the_last_accepted_draft(
    llm: LLM, staged: LLM
) -> None:
    """Outputs of two tokens alone repeat, so that drafts are often right and often wrong."""
    prompts = random_prompts(5, 331, longest=60, seed=4)
    params = SamplingParams(
        temperature=0, max_tokens=40, ignore_eos=True, allowed_token_ids=[17, 200]
    )
    expected, outputs = (one.generate(prompts, params, use_tqdm=False) for one in (llm, staged))
    assert [out.outputs[0].token_ids for out in outputs] == [
        out.outputs[0].token_ids for out in expected
    ]
    drafted = sum(out.metrics.num_draft_tokens or 0 for out in outputs)
    accepted = sum(out.metrics.num_accepted_tokens or 0 for out in outputs)
    assert 0.1 * drafted < accepted < 0.9 * drafted
