"""AsyncLLM.encode over a core that the test plays, and the results that are made of vectors."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from sidestep import AsyncLLM, PoolingParams, RequestError, SamplingParams, ValidationError
from sidestep.frontend.api.scores import Scores
from sidestep.frontend.input.prompt_limit import PromptLimit
from sidestep.frontend.input.tokenizer import Tokenizer
from sidestep.frontend.options.engine_args import EngineArgs
from sidestep.frontend.output.pooling_outputs import check_params, result_of
from sidestep.ipc.model.pooling_spec import PoolingSpec
from sidestep.ipc.transport.messages import Finished, FinishReason, Outputs, pack_ids
from sidestep.ipc.transport.step import Float32
from tests.unit.frontend.api.test_async_llm import added
from tests.unit.frontend.api.test_async_llm_ends import until
from tests.unit.frontend.fakes import FakeChannel

EMBED = PoolingSpec(task="embed", pooling="last", width=4, activation="normalize")
HEAD = PoolingSpec(
    task="classify", pooling="last", width=2, activation="softmax", labels=("a", "b")
)
RERANK = PoolingSpec(task="classify", pooling="last", width=1, activation="sigmoid", labels=("a",))
VECTOR = np.array([3, 0, 4, 0], np.float32)


@pytest.fixture
def pooling_llm(llm: AsyncLLM) -> AsyncLLM:
    """Return an AsyncLLM that pools, whose core is the test."""
    llm._config = EngineArgs(device="fake", runner="pooling").create_engine_config()
    llm._inputs.limit = PromptLimit(100, needs_output=False)
    return llm


def say(channel: FakeChannel, **vectors: Float32) -> None:
    """Send one step's vectors, by handles such as h0."""
    handles = [int(name[1:]) for name in vectors]
    channel.say(
        Outputs(
            handles=b"",
            token_ids=b"",
            finished=[Finished(handle=h, reason=FinishReason.STOP) for h in handles],
            pooled=pack_ids(handles),
            vectors=np.concatenate(list(vectors.values())).tobytes(),
        )
    )


async def encode(llm: AsyncLLM, **options: Any) -> Any:
    return [output async for output in llm.encode([5, 6, 7], **options)]


async def test_vectors_of_one_message_go_to_their_requests(
    pooling_llm: AsyncLLM, channel: FakeChannel
) -> None:
    calls = [asyncio.create_task(encode(pooling_llm)) for _ in range(2)]
    await until(lambda: len(channel.added) == 2)
    assert all(message.pooling == "last" for message in channel.added)
    say(channel, h1=VECTOR, h0=-VECTOR)
    ((one,), (other,)) = await asyncio.gather(*calls)
    np.testing.assert_allclose(one.outputs.data, [-0.6, 0, -0.8, 0], atol=1e-6)
    np.testing.assert_allclose(other.outputs.data, [0.6, 0, 0.8, 0], atol=1e-6)
    assert one.finished and one.prompt_token_ids == [5, 6, 7]
    assert one.metrics.num_generation_tokens == 0 and one.metrics.first_token_latency > 0
    assert len(pooling_llm._outputs) == 0


async def test_a_cancelled_call_aborts_its_request(
    pooling_llm: AsyncLLM, channel: FakeChannel
) -> None:
    call = asyncio.create_task(encode(pooling_llm))
    await added(channel)
    call.cancel()
    await until(lambda: channel.aborted == [0])
    say(channel, h0=VECTOR)
    with pytest.raises(asyncio.CancelledError):
        await call
    assert len(pooling_llm._outputs) == 0


async def test_an_aborted_request_raises(pooling_llm: AsyncLLM, channel: FakeChannel) -> None:
    call = asyncio.create_task(encode(pooling_llm, request_id="mine"))
    await added(channel)
    await pooling_llm.abort("mine")
    with pytest.raises(RequestError, match="ended before its vector was there"):
        await call


async def test_each_engine_refuses_the_requests_of_the_other_kind(
    llm: AsyncLLM, channel: FakeChannel
) -> None:
    with pytest.raises(ValidationError, match="runner: this engine generates text"):
        await encode(llm)
    llm._config = EngineArgs(device="fake", runner="pooling").create_engine_config()
    with pytest.raises(ValidationError, match="runner: .* generates no text"):
        await anext(llm.generate([5], SamplingParams()))
    assert channel.sent == []


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"dimensions": 9999}, "dimensions: 9999 is more"),
        ({"dimensions": 8}, "is_matryoshka"),
        ({"task": "classify"}, "task: must be 'embed'"),
        (5, "pooling_params: must be PoolingParams"),
    ],
    ids=str,
)
async def test_wrong_parameters_are_refused_before_anything_is_sent(
    params: Any, says: str, pooling_llm: AsyncLLM, channel: FakeChannel
) -> None:
    with pytest.raises(ValidationError, match=says):
        await encode(pooling_llm, pooling_params=params)
    assert channel.sent == []


@pytest.mark.parametrize(
    ("spec", "vector", "params", "expected"),
    [
        (EMBED, VECTOR, {}, [0.6, 0, 0.8, 0]),
        (EMBED, VECTOR, {"normalize": False}, [3, 0, 4, 0]),
        (EMBED, VECTOR, {"dimensions": 2}, [1, 0]),
        (EMBED, 0 * VECTOR, {}, [0, 0, 0, 0]),
        (HEAD, VECTOR[:2], {"use_activation": False}, [3, 0]),
        (HEAD, np.array([1000, 1000 - np.log(3)], np.float32), {}, [0.75, 0.25]),
        (RERANK, np.array([-1000], np.float32), {}, [0]),
        (RERANK, np.array([np.log(3)], np.float32), {}, [0.75]),
    ],
    ids=str,
)
def test_results_of_vectors(
    spec: PoolingSpec, vector: Float32, params: dict[str, Any], expected: list[float]
) -> None:
    got = result_of(vector, PoolingParams(**params), spec)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, atol=1e-4)


def test_only_lengths_of_the_training_are_taken() -> None:
    spec = PoolingSpec(
        task="embed",
        pooling="last",
        width=4,
        activation="none",
        is_matryoshka=True,
        dimensions=(2,),
    )
    check_params(PoolingParams(dimensions=2), spec)
    check_params(PoolingParams(dimensions=4), spec)
    with pytest.raises(ValidationError, match="3 is none of the model's 2"):
        check_params(PoolingParams(dimensions=3), spec)
    with pytest.raises(ValidationError, match="this model classifies"):
        check_params(PoolingParams(dimensions=2), HEAD)


def test_pairs_of_texts(tokenizer: Tokenizer) -> None:
    scores = Scores(EMBED, ["a"], ["b", "c"])
    assert scores.prompts(tokenizer) == ["a", "b", "c"]
    assert scores.of([VECTOR, 2 * VECTOR, -VECTOR]) == pytest.approx([1, -1])
    joined = Scores(RERANK, ["a", "b"], ["c", "d"])
    assert joined.prompts(tokenizer) == [
        tokenizer.encode_pair("a", "c"),
        tokenizer.encode_pair("b", "d"),
    ]
    for ones, others in ((["a", "b"], ["c"]), ([], ["a"]), (["a"], [])):
        with pytest.raises(ValidationError, match="make no pairs"):
            Scores(EMBED, ones, others)
    with pytest.raises(ValidationError, match="this one has 2"):
        Scores(HEAD, ["a"], ["b"])
