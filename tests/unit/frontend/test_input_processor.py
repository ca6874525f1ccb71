"""Bad input raises at the call, with the field's name."""

from typing import Any

import pytest

from sidestep import SamplingParams, ValidationError
from sidestep.frontend.tokenizer import Tokenizer
from tests.unit.frontend.fakes import input_processor


@pytest.mark.parametrize(("prompt", "options", "field"), [
    ("", {}, "prompt"), ([], {}, "prompt"), ([5, -1], {}, "prompt_token_ids"), ([5, 10**6], {}, "prompt_token_ids"),
    ([5] * 100, {}, "prompt"), (7, {}, "prompt"), ([1, "a"], {}, "prompt"), ([True], {}, "prompt"),
    ({"prompt": "a", "prompt_token_ids": [1]}, {}, "prompt"), ({"promt": "a"}, {}, "prompt"), ({}, {}, "prompt"),
    ("a", {"priority": "high"}, "priority"), ("a", {"deadline_s": 0}, "deadline_s"),
    ("a", {"deadline_s": "soon"}, "deadline_s"), ("a", {"cache_salt": ""}, "cache_salt"),
    ("a", {"sampling_params": {"n": 1}}, "sampling_params"),
    ("a", {"sampling_params": SamplingParams(stop_token_ids=[10**6])}, "stop_token_ids")])
async def test_wrong_input_names_its_field(tokenizer: Tokenizer, prompt: Any, options: dict[str, Any],
                                           field: str) -> None:
    params = options.pop("sampling_params", None)
    with pytest.raises(ValidationError) as caught:
        await input_processor(tokenizer).process(prompt, params, **options)
    assert caught.value.field == field


async def test_a_prompt_that_is_too_long_is_told_by_how_much(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValidationError, match=r"has 100 tokens.*max_model_len \(100\)"):
        await input_processor(tokenizer).process([5] * 100, None)


@pytest.mark.parametrize("prompt", ["def f(", {"prompt": "def f("}])
async def test_texts_are_tokenised(tokenizer: Tokenizer, prompt: Any) -> None:
    request = await input_processor(tokenizer).process(prompt, None)
    assert request.prompt_token_ids == tokenizer.encode("def f(") and request.prompt == "def f("


@pytest.mark.parametrize("prompt", [[5, 6], (5, 6), {"prompt_token_ids": [5, 6]}])
async def test_token_ids_are_taken_as_they_are(tokenizer: Tokenizer, prompt: Any) -> None:
    request = await input_processor(tokenizer).process(prompt, None)
    assert request.prompt_token_ids == [5, 6] and request.prompt is None


async def test_messages_go_through_the_chat_template(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    request = await input_processor(tokenizer).process(messages, None)
    assert request.prompt == tokenizer.apply_chat_template(messages)
    assert request.prompt_token_ids == tokenizer.apply_chat_template(messages, tokenize=True)


async def test_long_texts_are_tokenised_to_the_same(tokenizer: Tokenizer) -> None:
    text = "def get_name(self): return self.name\n" * 100
    request = await input_processor(tokenizer, max_model_len=9999).process(text, None)
    assert request.prompt_token_ids == tokenizer.encode(text)


async def test_what_was_left_open_is_filled_in(tokenizer: Tokenizer) -> None:
    process = input_processor(tokenizer).process
    one, two = [await process([5] * 10, SamplingParams(max_tokens=None)) for _ in range(2)]
    assert one.sampling.max_tokens == 90
    assert one.sampling.seed is not None and one.sampling.seed != two.sampling.seed
    assert (await process([5], SamplingParams(seed=3))).sampling.seed == 3
