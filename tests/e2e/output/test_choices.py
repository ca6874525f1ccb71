"""Several completions of one prompt equal those of lone requests with the same seeds.

The models run in float32 on the CPU.
"""

from __future__ import annotations

from typing import Any

import pytest

from sidestep import SamplingParams
from tests.e2e.engines import Engines
from tests.e2e.models import RandomModel, random_prompts, reference_tokens


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": False, "enable_prefix_caching": False},
        {
            "max_num_batched_tokens": 48,
            "max_num_seqs": 12,
            "block_size": 8,
            "num_kv_blocks": 30,
            "max_model_len": 200,
        },
    ],
    ids=str,
)
def test_choices_equal_lone_requests_and_leave_their_neighbours_alone(
    options: dict[str, Any], random_model: RandomModel, engines: Engines
) -> None:
    path, model = random_model("llama-gqa")
    prompts = random_prompts(8, 331)
    sampled = [
        SamplingParams(
            n=4,
            seed=i,
            temperature=0.9,
            top_k=20,
            max_tokens=10 + i,
            ignore_eos=True,
            frequency_penalty=i % 2,
            logprobs=i % 3,
        )
        for i in range(4)
    ]
    alone = [params.for_choice(index) for params in sampled for index in range(4)]
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = engines.get(path).generate(
        [p for p in prompts[:4] for _ in range(4)], alone, use_tqdm=False
    )
    llm = engines.get(path, **options)
    got = llm.generate(prompts, [*sampled, *[greedy] * 4], use_tqdm=False)
    stats = llm.get_stats()
    texts = [out.outputs[0].token_ids for out in expected]
    sums = [out.outputs[0].cumulative_logprob for out in expected]
    assert [c.cumulative_logprob for out in got[:4] for c in out.outputs] == pytest.approx(
        sums, abs=1e-3
    )
    assert [c.token_ids for out in got[:4] for c in out.outputs] == texts
    assert len({tuple(tokens) for tokens in texts}) == 16
    plain = reference_tokens(model, prompts[4:], [20] * 4)
    assert [out.outputs[0].token_ids for out in got[4:]] == plain
    assert [[c.index for c in out.outputs] for out in got[:4]] == [[0, 1, 2, 3]] * 4
    assert stats["kv_cache_usage"] == 0
    if "num_kv_blocks" in options:
        assert stats["num_preemptions"] > 0


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_best_of_returns_the_most_probable(
    n: int, logprobs: int | None, random_model: RandomModel, engines: Engines
) -> None:
    llm, prompt = engines.get(random_model("llama-gqa")[0]), random_prompts(1, 331)[0]
    options: dict[str, Any] = {"seed": 3, "max_tokens": 9, "ignore_eos": True, "temperature": 2}
    (some,) = llm.generate(
        [prompt], SamplingParams(n=n, best_of=6, logprobs=logprobs, **options), use_tqdm=False
    )
    (all_,) = llm.generate([prompt], SamplingParams(n=6, logprobs=0, **options), use_tqdm=False)
    ranked = sorted(
        all_.outputs,
        key=lambda c: (
            -sum(
                entry[token].logprob
                for entry, token in zip(c.logprobs or (), c.token_ids, strict=True)
            )
        ),
    )
    assert [c.token_ids for c in some.outputs] == [c.token_ids for c in ranked[:n]]
    assert [c.index for c in some.outputs] == list(range(n))
    assert [c.cumulative_logprob for c in some.outputs] == pytest.approx(
        [c.cumulative_logprob for c in ranked[:n]]
    )
    assert all((c.logprobs is None) == (logprobs is None) for c in some.outputs)
    assert some.metrics.num_generation_tokens == 54, "all of them were made"


def test_two_ranks_copy_the_same_blocks(random_model: RandomModel, engines: Engines) -> None:
    path, _ = random_model("qwen3-tied")
    params = SamplingParams(n=3, seed=5, max_tokens=12, ignore_eos=True)
    answers = []
    for ranks in (1, 2):
        llm = engines.get(path, tensor_parallel_size=ranks)
        (out,) = llm.generate([random_prompts(1, 331)[0]], params, use_tqdm=False)
        answers.append([c.token_ids for c in out.outputs])
    assert answers[0] == answers[1]
