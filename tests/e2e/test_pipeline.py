"""Pipeline stages in processes of their own.

The tokens equal those of one rank and of transformers, in float32 on the CPU.
"""

from __future__ import annotations

from typing import Any

import pytest

from sidestep import DEFAULT_MODEL, LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from tests.e2e.models import RandomModel, random_prompts, reference_tokens
from tests.e2e.test_parity import engine_tokens

SMALL: dict[str, Any] = {
    "max_num_batched_tokens": 48,
    "max_num_seqs": 7,
    "block_size": 8,
    "num_kv_blocks": 40,
    "max_model_len": 200,
}
"""Options so small that prompts come in chunks and requests are preempted."""


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama-mha-tied", {"pipeline_parallel_size": 2, "pipeline_layers": (1, 2), **SMALL}),
        ("qwen2-window", {"pipeline_parallel_size": 3}),
        ("qwen3-moe", {"pipeline_parallel_size": 2}),
        ("gemma4", {"pipeline_parallel_size": 2, **SMALL, "num_kv_blocks": 120}),
        ("qwen3.5", {"pipeline_parallel_size": 2, **SMALL}),
        (
            "llama-biases",
            {
                "pipeline_parallel_size": 2,
                "async_scheduling": False,
                "enable_prefix_caching": False,
            },
        ),
        ("llama-mqa-odd-sizes", {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, **SMALL}),
    ],
    ids=str,
)
def test_ranks_and_stages_equal_transformers(
    family: str,
    options: dict[str, Any],
    random_model: RandomModel,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Also check that no rank writes a library's warning to the screen.

    Users stream text there.
    """
    path, model = random_model(family)
    prompts = random_prompts(12, model.config.vocab_size)
    counts = [4 + 5 * (i % 5) for i in range(12)]
    expected = reference_tokens(model, prompts, counts)
    capfd.readouterr()
    assert engine_tokens(path, prompts, counts, **options) == expected
    shown = capfd.readouterr()
    assert "Warning" not in shown.out + shown.err


def test_the_order_of_requests_changes_nothing(random_model: RandomModel) -> None:
    """Cover other orders: requests share steps with others and are divided differently.

    Each order divides the requests in its own way among the steps in flight.
    """
    path, model = random_model("qwen3-tied")
    prompts = random_prompts(40, 331)
    expected = reference_tokens(model, prompts, [6 + i % 9 for i in range(40)])
    order = sorted(range(40), key=lambda i: (i * 17) % 40)
    with LLM(
        path, device="cpu", dtype="float32", cpu_threads=1, pipeline_parallel_size=2, max_num_seqs=9
    ) as llm:
        for turn in (range(40), order, range(1)):
            params = [
                SamplingParams(temperature=0, max_tokens=6 + i % 9, ignore_eos=True) for i in turn
            ]
            got = llm.generate([prompts[i] for i in turn], params, use_tqdm=False)
            assert [out.outputs[0].token_ids for out in got] == [expected[i] for i in turn]


FORM = StructuredOutputsParams(
    json={
        "type": "object",
        "required": ["name"],
        "additionalProperties": False,
        "properties": {"name": {"type": "string", "pattern": "^[a-z_]{1,12}$"}},
    }
)
REQUESTS: list[dict[str, Any]] = [
    {},
    {"frequency_penalty": 1.3, "presence_penalty": 0.5},
    {"structured_outputs": FORM, "max_tokens": 60},
    {"prompt_logprobs": 2, "logprobs": 3},
    {"n": 3, "temperature": 1.0, "logprobs": 1},
    {"repetition_penalty": 4.0, "min_tokens": 20},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"structured_outputs": FORM, "temperature": 1.0, "max_tokens": 60},
    {"allowed_token_ids": [300, 301, 302, 400]},
]
TEXTS = ["def get_name(", "class Stack:\n", "import os\n\ndef read_file(path):"]


def everything(**options: Any) -> list[Any]:
    """Return the bundled model's outputs for requests of all kinds and searches, at once."""
    prompts = [TEXTS[i % 3] * (1 + 3 * (i % 2)) for i in range(len(REQUESTS))]
    params = [
        SamplingParams(**{"temperature": 0, "seed": i, "max_tokens": 30, **more})
        for i, more in enumerate(REQUESTS)
    ]
    with LLM(
        DEFAULT_MODEL,
        device="cpu",
        dtype="float32",
        cpu_threads=1,
        max_model_len=160,
        block_size=8,
        max_num_batched_tokens=24,
        max_num_seqs=12,
        **options,
    ) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        beams = llm.beam_search(TEXTS[:2], BeamSearchParams(beam_width=4, max_tokens=12))
        preempted = llm.get_stats()["num_preemptions"] > 0
    told = [(out.outputs[0].logprobs, out.prompt_logprobs) for out in outputs]
    return [
        [c.token_ids for out in outputs for c in out.outputs],
        [[s.tokens for s in b.sequences] for b in beams],
        [
            [
                {token: entry.logprob for token, entry in position.items()}
                for position in positions
                if position is not None
            ]
            for pair in told
            for positions in pair
            if positions is not None
        ],
        preempted,
    ]


def test_requests_of_all_kinds_are_answered_as_by_one_rank() -> None:
    tokens, beams, logprobs, _ = everything(num_kv_blocks=200)
    assert len({tuple(answer) for answer in tokens}) == len(tokens)
    got_tokens, got_beams, got_logprobs, preempted = everything(
        num_kv_blocks=26, pipeline_parallel_size=2, pipeline_layers=(4, 2)
    )
    assert preempted
    assert got_tokens == tokens
    assert got_beams == beams
    assert len(logprobs) == 3
    for got, expected in zip(got_logprobs, logprobs, strict=True):
        assert [list(position) for position in got] == [list(position) for position in expected]
        assert [list(position.values()) for position in got] == [
            pytest.approx(list(position.values()), abs=1e-4) for position in expected
        ]
