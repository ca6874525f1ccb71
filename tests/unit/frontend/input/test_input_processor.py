"""Bad input raises at the call, with the field's name."""

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from sidestep import SamplingParams, ValidationError
from sidestep.frontend.input.prompt_limit import PromptLimit
from sidestep.frontend.input.tokenizer import Tokenizer
from sidestep.ipc.transport.messages import AddRequest, decode_to_core, encode
from tests.unit.frontend.fakes import input_processor


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("", {}, "prompt"),
        ([], {}, "prompt"),
        ([5, -1], {}, "prompt_token_ids"),
        ([5, 10**6], {}, "prompt_token_ids"),
        ([5] * 100, {}, "prompt"),
        (7, {}, "prompt"),
        ([1, "a"], {}, "prompt"),
        ([True], {}, "prompt"),
        ({"prompt": 5, "prompt_token_ids": [1]}, {}, "prompt"),
        ({"promt": "a"}, {}, "prompt"),
        ({}, {}, "prompt"),
        (b"abc", {}, "prompt"),
        ({"prompt": [5]}, {}, "prompt"),
        ({"prompt_token_ids": "a"}, {}, "prompt_token_ids"),
        ({"prompt_token_ids": [5.0]}, {}, "prompt_token_ids"),
        ("\ud83d", {}, "prompt"),
        (None, {}, "prompt"),
        ([{"role": "user"}], {}, "messages"),
        ([{"role": "user", "content": "a"}, "b"], {}, "messages"),
        ("a", {"priority": True}, "priority"),
        ("a", {"priority": 2**40}, "priority"),
        ("a", {"deadline_s": float("nan")}, "deadline_s"),
        ("a", {"deadline_s": float("inf")}, "deadline_s"),
        ("a", {"deadline_s": True}, "deadline_s"),
        ("a", {"num_public_tokens": -1}, "num_public_tokens"),
        ("a", {"num_public_tokens": 99}, "num_public_tokens"),
        ("a", {"cache_salt": 5}, "cache_salt"),
        ("a", {"cache_salt": "\ud83d"}, "cache_salt"),
        ("a", {"sampling_params": SamplingParams(stop="\ud83d")}, "stop"),
        ("a", {"sampling_params": SamplingParams(min_tokens=100, max_tokens=None)}, "min_tokens"),
        ("a", {"priority": "high"}, "priority"),
        ("a", {"deadline_s": 0}, "deadline_s"),
        ("a", {"deadline_s": "soon"}, "deadline_s"),
        ("a", {"cache_salt": ""}, "cache_salt"),
        ("a", {"sampling_params": 5}, "sampling_params"),
        ("a", {"sampling_params": SamplingParams(stop_token_ids=[10**6])}, "stop_token_ids"),
    ],
)
async def test_wrong_input_names_its_field(
    tokenizer: Tokenizer, prompt: Any, options: dict[str, Any], field: str
) -> None:
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
    assert request.prompt == tokenizer.render_chat(messages)
    assert request.prompt_token_ids == tokenizer.apply_chat_template(
        messages, add_generation_prompt=True
    )


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


async def test_what_has_no_effect_beyond_a_limit_is_brought_within_it(tokenizer: Tokenizer) -> None:
    """The core and its workers keep 32-bit numbers: no larger one may reach them."""
    huge = SamplingParams(max_tokens=10**30, top_k=10**30, temperature=1e-30)
    sampling = (await input_processor(tokenizer).process([5] * 10, huge)).sampling
    assert (sampling.max_tokens, sampling.top_k, sampling.temperature) == (90, 0, 0.01)


async def test_numbers_of_numpy_can_be_sent(tokenizer: Tokenizer) -> None:
    params = SamplingParams(temperature=np.float64(0.5), top_p=np.float64(0.9))
    sampling = (await input_processor(tokenizer).process([5], params)).sampling
    message = AddRequest(
        client=0, handle=0, request_id="", prompt_token_ids=b"", sampling=sampling, arrival=0.0
    )
    assert decode_to_core(encode(message)) == message


async def test_the_event_loop_goes_on_while_a_long_text_is_tokenised(tokenizer: Tokenizer) -> None:
    tokenising, go_on = threading.Event(), threading.Event()

    class Slow(Tokenizer):
        def __init__(self) -> None:
            self.fast, self.bound = tokenizer.fast, tokenizer.bound

        def encode(
            self, text: str, add_special_tokens: bool = True, limit: PromptLimit | None = None
        ) -> list[int]:
            tokenising.set()
            assert go_on.wait(30)
            return [5]

    task = asyncio.create_task(input_processor(Slow(), 1000).process("x" * 5000, None))
    while not tokenising.is_set():
        await asyncio.sleep(0)  # this loop runs: the thread is waiting for it
    go_on.set()
    assert (await task).prompt_token_ids == [5]
