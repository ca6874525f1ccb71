"""A GPU's worker after an exception in a step: requests go on, with captured graphs and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sidestep import LLM, RequestError, SamplingParams
from tests.e2e.models import random_prompts, write_model
from tests.e2e.output.failing_processor import TARGET

pytestmark = pytest.mark.gpu
PROMPTS = random_prompts(9, 331)


def params(plan: dict[str, Any] | None = None) -> list[SamplingParams]:
    """Return the parameters of PROMPTS; the last request has the plan."""
    plain: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "temperature": 0}
    extra = {"FailingProcessor": plan or {}}
    return [*[SamplingParams(**plain)] * 8, SamplingParams(**plain, extra_args=extra)]


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}], ids=["graphs", "eager"])
def test_requests_go_on_and_the_one_to_blame_ends_alone(
    options: dict[str, Any], model_folder: Path
) -> None:
    path = write_model("llama-gqa", model_folder)
    options = {"dtype": "float32", "num_kv_blocks": 256, "logits_processors": [TARGET], **options}
    tokens = []
    for plan in (None, {"in": "apply", "at": 5, "oom": True}, {"in": "sampled", "at": 5}):
        with LLM(path, **options) as llm:
            outputs = llm.generate(PROMPTS, params(plan), use_tqdm=False)
            stats = llm.get_stats()
        assert stats["soft_resets_oom"] + stats["soft_resets_exception"] == (plan is not None)
        tokens.append([output.outputs[0].token_ids for output in outputs])
    assert tokens[1] == tokens[0] and tokens[2] == tokens[0]
    with LLM(path, **options) as llm:
        wrong = params({"in": "enter", "at": 0})[8]
        with pytest.raises(RequestError, match="ValueError: call 0 of enter fails"):
            llm.generate(PROMPTS[8], wrong, use_tqdm=False)
        outputs = llm.generate(PROMPTS[:8], params()[:8], use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == tokens[0][:8]
