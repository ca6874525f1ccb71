"""Options that follow from the model's files.

They are the length of requests, the default sampling, and whether the engine runs without a
tokenizer.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sidestep import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    SamplingParams,
    StructuredOutputsParams,
    ValidationError,
)
from sidestep.executor.runner.fake import expected_tokens

MakeLLM = Callable[..., AsyncLLM]
PROMPT = [1, 2, 3]


@pytest.mark.parametrize("given", [{}, {"max_model_len": "auto"}], ids=str)
async def test_the_length_fits_itself_to_the_cache_and_says_so(
    given: dict[str, str], make_llm: MakeLLM, caplog: pytest.LogCaptureFixture
) -> None:
    llm = make_llm(num_kv_blocks=4, **given)
    assert llm.max_model_len == 64
    (line,) = [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    ]
    assert line.startswith(
        "max_model_len is 64, which is what the KV cache holds; the model's own limit is 2048"
    )
    with pytest.raises(ValidationError, match=r"max_model_len \(64\)"):
        await anext(llm.generate([1] * 64))
    async for out in llm.generate([1] * 40, SamplingParams(max_tokens=1000, ignore_eos=True)):
        pass
    assert len(out.outputs[0].token_ids) == 24


def test_a_cache_that_holds_the_longest_request_is_no_news(
    make_llm: MakeLLM, caplog: pytest.LogCaptureFixture
) -> None:
    llm = make_llm(num_kv_blocks=128)
    assert llm.max_model_len == 2048 and not [
        r for r in caplog.records if r.levelno >= logging.WARNING
    ]


@pytest.fixture
def without_tokenizer(fake_model: str, tmp_path: Path) -> str:
    """Return a folder with the configs alone."""
    shutil.copy(Path(fake_model) / "config.json", tmp_path)
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"temperature": 0, "max_new_tokens": 5, "eos_token_id": 0})
    )
    return str(tmp_path)


def tokens_of(folder: str, count: int, seed: int = 0) -> list[int]:
    """Return the fake device's answer to PROMPT; at temperature 0 the seed is 0."""
    vocab_size = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
    return expected_tokens(PROMPT, count, seed, vocab_size)


async def refused(llm: AsyncLLM, prompt: Any, params: SamplingParams | None = None) -> str:
    with pytest.raises(ValidationError) as caught:
        await anext(llm.generate(prompt, params))
    assert str(caught.value).endswith("was started without a tokenizer (skip_tokenizer_init)")
    return caught.value.field


async def test_without_a_tokenizer_token_ids_go_in_and_come_out(
    make_llm: MakeLLM, without_tokenizer: str
) -> None:
    llm = make_llm(model=without_tokenizer, skip_tokenizer_init=True)
    params = SamplingParams(seed=4, max_tokens=6, ignore_eos=True)
    async for out in llm.generate(PROMPT, params):
        pass
    completion = out.outputs[0]
    assert completion.token_ids == tokens_of(without_tokenizer, 6, seed=4) and completion.text == ""
    ending = completion.token_ids[2]
    async for out in llm.generate(
        {"prompt_token_ids": PROMPT}, SamplingParams(seed=4, stop_token_ids=[ending])
    ):
        pass
    assert (
        out.outputs[0].token_ids == completion.token_ids[:3]
        and out.outputs[0].stop_reason == ending
    )
    found = await llm.beam_search(PROMPT, BeamSearchParams(beam_width=2, max_tokens=3))
    assert [sequence.text for sequence in found.sequences] == ["", ""] and len(
        found.sequences[0].tokens
    ) == 6
    assert await refused(llm, "text") == "prompt"
    assert await refused(llm, {"prompt": "text"}) == "prompt"
    assert await refused(llm, [{"role": "user", "content": "hi"}]) == "messages"
    assert await refused(llm, PROMPT, SamplingParams(stop="x")) == "stop"
    assert await refused(llm, PROMPT, SamplingParams(bad_words=["x"])) == "bad_words"
    structure = StructuredOutputsParams(regex="a")
    assert (
        await refused(llm, PROMPT, SamplingParams(structured_outputs=structure))
        == "structured_outputs"
    )


def test_a_chat_gets_the_template_of_the_option(fake_model: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    with LLM(fake_model, device="fake", chat_template=str(file)) as llm:
        chat: Any = [{"role": "user", "content": "hi"}]
        params = SamplingParams(max_tokens=1)
        (out,) = llm.chat(chat, params, use_tqdm=False)
        assert out.prompt == "<user>hi"
        (out,) = llm.chat(chat, params, chat_template="of the call", use_tqdm=False)
        assert out.prompt == "of the call"


def test_requests_without_parameters_are_sampled_as_the_model_s_makers_say(
    without_tokenizer: str,
) -> None:
    """Also check that an explicit SamplingParams is taken as it is."""
    with LLM(without_tokenizer, device="fake", skip_tokenizer_init=True) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0, max_tokens=5)
        mixed: Any = [None, SamplingParams(seed=0)]
        outputs = llm.generate([PROMPT] * 2, use_tqdm=False)
        outputs += llm.generate([PROMPT] * 2, mixed, use_tqdm=False)
        greedy, seeded = tokens_of(without_tokenizer, 5), tokens_of(without_tokenizer, 16)
        assert [out.outputs[0].token_ids for out in outputs] == [greedy, greedy, greedy, seeded]
    with LLM(
        without_tokenizer, device="fake", skip_tokenizer_init=True, generation_config="none"
    ) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
