"""The openai client over the whole surface, against the bundled model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.live import ANSWER_S, LiveServer

CHAT: Any = [
    {"role": "system", "content": "Write Python."},
    {"role": "user", "content": "def get_name("},
]
PROMPT = "def get_name("
MODEL = "tiny-python"


@pytest.fixture
def client(tiny: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{tiny.url}/v1", api_key="none", max_retries=0, timeout=ANSWER_S
    ) as made:
        yield made


def count(server: LiveServer, **body: object) -> int:
    """Return the number of tokens, as the tokenizer counts them."""
    tokens = server.post("/tokenize", body).raise_for_status().json()
    assert tokens["count"] == len(tokens["tokens"])
    return int(tokens["count"])


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL == client.models.retrieve(MODEL).id
    with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here"):
        client.models.retrieve("gpt-4")


def test_a_chat_streams_what_it_gives_at_once(client: openai.OpenAI, tiny: LiveServer) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": CHAT,
        "temperature": 0,
        "max_completion_tokens": 24,
    }
    whole = client.chat.completions.create(**options)
    assert whole.usage is not None and whole.choices[0].message.role == "assistant"
    assert whole.usage.prompt_tokens == count(tiny, messages=CHAT)
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert (
        "".join(c.choices[0].delta.content or "" for c in chunks[:-1])
        == whole.choices[0].message.content
    )
    reasons = [c.choices[0].finish_reason for c in chunks[:-1]]
    assert reasons[-1] == whole.choices[0].finish_reason and not any(reasons[:-1])
    assert len({c.id for c in chunks}) == 1 and all(c.usage is None for c in chunks[:-1])
    assert not chunks[-1].choices and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_a_completion_streams_what_it_gives_at_once(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 24}
    whole = client.completions.create(**options)
    chunks = list(client.completions.create(**options, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert all(c.usage is None for c in chunks)


def test_usage_counts_what_the_tokenizer_counts(client: openai.OpenAI, tiny: LiveServer) -> None:
    made = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=17,
        temperature=1,
        seed=1,
        extra_body={"ignore_eos": True, "skip_special_tokens": False},
    )
    assert made.usage is not None
    assert made.usage.prompt_tokens == count(tiny, prompt=PROMPT)
    assert made.usage.completion_tokens == 17
    # Text that is cut anywhere else would not count the same again.
    ids = tiny.post("/tokenize", {"prompt": made.choices[0].text}).json()["tokens"]
    assert tiny.post("/detokenize", {"tokens": ids}).json() == {"prompt": made.choices[0].text}


def test_several_choices_each_have_a_seed_of_their_own_and_the_first_has_the_given_one(
    client: openai.OpenAI,
) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "prompt": PROMPT,
        "temperature": 1,
        "max_tokens": 12,
        "seed": 5,
    }
    three = client.completions.create(**options, n=3)
    again = client.completions.create(**options, n=3)
    texts = [c.text for c in three.choices]
    assert texts == [c.text for c in again.choices] and len(set(texts)) == 3
    assert client.completions.create(**options).choices[0].text == texts[0]
    assert [c.index for c in three.choices] == [0, 1, 2]
    assert three.usage is not None and again.usage is not None
    assert three.usage.prompt_tokens == again.usage.prompt_tokens
    streamed = ["", "", ""]
    for chunk in client.completions.create(**options, n=3, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts


def test_several_prompts_are_completed_in_their_order(
    client: openai.OpenAI, tiny: LiveServer
) -> None:
    prompts = ["def get_name(", "class Stack:"]
    options: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 8}
    both = client.completions.create(prompt=prompts, **options, n=2)
    ones = [client.completions.create(prompt=p, **options).choices[0].text for p in prompts]
    assert [c.text for c in both.choices] == [ones[0], ones[0], ones[1], ones[1]]
    assert both.usage is not None
    assert both.usage.prompt_tokens == sum(count(tiny, prompt=p) for p in prompts)
    ids = [tiny.post("/tokenize", {"prompt": p}).json()["tokens"] for p in prompts]
    assert [c.text for c in client.completions.create(prompt=ids, **options).choices] == ones
    assert client.completions.create(prompt=ids[0], **options).choices[0].text == ones[0]


def test_stop_strings_end_the_text(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 30}
    text = client.completions.create(**options).choices[0].text
    stop = text[5:7]
    cut = client.completions.create(**options, stop=[stop]).choices[0]
    assert cut.text == text[: text.index(stop)] and cut.finish_reason == "stop"
    assert cut.model_extra is not None and cut.model_extra["stop_reason"] == stop
    kept = client.completions.create(
        **options, stop=stop, extra_body={"include_stop_str_in_output": True}
    ).choices[0]
    assert kept.text == cut.text + stop
    streamed = list(client.completions.create(**options, stop=stop, stream=True))
    assert "".join(c.choices[0].text for c in streamed) == cut.text


def test_echo_repeats_the_prompt(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 8}
    text = client.completions.create(**options).choices[0].text
    assert client.completions.create(**options, echo=True).choices[0].text == PROMPT + text
    assert (
        "".join(
            c.choices[0].text for c in client.completions.create(**options, echo=True, stream=True)
        )
        == PROMPT + text
    )


def test_extra_fields_reach_the_engine(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "temperature": 2, "max_tokens": 12}
    greedy = client.completions.create(**{**options, "temperature": 0}).choices[0].text
    assert client.completions.create(**options, extra_body={"top_k": 1}).choices[0].text == greedy
    assert client.completions.create(**options, extra_body={"min_p": 1}).choices[0].text == greedy
    second = client.completions.create(**options, extra_body={"top_k": 1, "cache_salt": "a"})
    assert second.usage is not None and second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens == 0


def test_a_prompt_that_was_seen_before_comes_from_the_cache(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "prompt": "def cached(value):\n    return value\n" * 8,
        "max_tokens": 4,
    }
    first, second = (client.completions.create(**options).usage for _ in range(2))
    assert first is not None and second is not None and second.prompt_tokens_details is not None
    assert 0 < (second.prompt_tokens_details.cached_tokens or 0) < second.prompt_tokens


def test_the_client_s_helpers_for_streams_work(client: openai.OpenAI) -> None:
    hello: dict[str, Any] = {"model": MODEL, "temperature": 0}
    with client.chat.completions.stream(
        **hello, messages=[{"role": "user", "content": "hi"}]
    ) as chat:
        chat.until_done()
        text = chat.get_final_completion().choices[0].message.content
    with client.responses.stream(**hello, input="hi") as response:
        response.until_done()
        assert response.get_final_response().output_text == text
    raw = client.completions.with_raw_response.create(**hello, prompt=PROMPT)
    assert raw.headers["x-request-id"] == raw.parse().id


def test_errors_are_the_client_s_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="a")
    assert missing.value.param == "model" and missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "word " * 3000}]
        )
    assert long.value.code == "context_length_exceeded" and long.value.param == "messages"
    assert "This model's maximum context length is 2048 tokens. However, your messages" in str(
        long.value
    )
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=CHAT, service_tier="flex")
    assert refused.value.param == "service_tier" and refused.value.code == "unsupported_field"


def test_a_stream_that_is_closed_early_ends_at_the_engine(
    client: openai.OpenAI, tiny: LiveServer
) -> None:
    stream = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    tiny.until_idle()
    assert tiny.metrics()['sidestep:request_success_total{finished_reason="abort"}'] >= 1


async def test_the_async_client_does_the_same(tiny: LiveServer) -> None:
    options: dict[str, Any] = {"model": MODEL, "temperature": 0}
    async with openai.AsyncOpenAI(
        base_url=f"{tiny.url}/v1", api_key="none", max_retries=0, timeout=ANSWER_S
    ) as client:
        assert [m.id async for m in client.models.list()] == [MODEL]
        whole = await client.chat.completions.create(**options, messages=CHAT, max_tokens=16)
        stream = await client.chat.completions.create(
            **options, messages=CHAT, max_tokens=16, stream=True
        )
        assert (
            "".join([c.choices[0].delta.content or "" async for c in stream])
            == whole.choices[0].message.content
        )
        text = await client.completions.create(**options, prompt=PROMPT, max_tokens=16)
        parts = await client.completions.create(
            **options, prompt=PROMPT, max_tokens=16, stream=True
        )
        assert "".join([c.choices[0].text async for c in parts]) == text.choices[0].text
        with pytest.raises(openai.BadRequestError, match="top_p"):
            await client.completions.create(**options, prompt=PROMPT, top_p=7)
        with pytest.raises(openai.BadRequestError, match="nonsense"):
            await client.chat.completions.create(
                **options, messages=CHAT, extra_body={"nonsense": 1}
            )
