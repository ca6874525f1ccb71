"""The routes for vectors, by the openai client and by plain requests."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import openai
import pytest

from sidestep import DEFAULT_MODEL
from tests.e2e.pooling_models import normalized, pooled, states
from tests.server.live import LiveServer

MODEL = "tiny-python"
TEXTS = ["def get_name(", "import os\nimport sys\n", "class Stack:"]
Make = Callable[..., LiveServer]
HEADS: dict[str, Any] = {
    "architectures": ["LlamaForSequenceClassification"],
    "id2label": {"0": "bad", "1": "good"},
}


@pytest.fixture
def client(embedding: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{embedding.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def answer(server: LiveServer, path: str, **body: Any) -> dict[str, Any]:
    answered: dict[str, Any] = server.post(path, body).raise_for_status().json()
    return answered


def refusal(server: LiveServer, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
    response = server.post(path, body)
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def heads(make_server: Make, *words: str, step_ms: float = 1, **config: Any) -> LiveServer:
    """Return a server of a model with a classification head, on the fake device."""
    return make_server("--hf-overrides", json.dumps({**HEADS, **config}), *words, step_ms=step_ms)


def test_the_openai_client_gets_the_embeddings_of_transformers(
    client: openai.OpenAI, embedding: LiveServer
) -> None:
    """The client asks for base64 by default, and for numbers on demand."""
    ids = [answer(embedding, "/tokenize", prompt=text)["tokens"] for text in TEXTS]
    expected = normalized(pooled(states(DEFAULT_MODEL, ids), "last"))
    whole = client.embeddings.create(model=MODEL, input=TEXTS)
    numbers = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    tokens = client.embeddings.create(model=MODEL, input=ids)
    for found in (whole, numbers, tokens):
        assert [one.index for one in found.data] == [0, 1, 2] and found.model == MODEL
        for one, wanted in zip(found.data, expected, strict=True):
            np.testing.assert_allclose(one.embedding, wanted, atol=1e-5)
        assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, ids))


def test_one_text_one_list_of_ids_and_fewer_dimensions(client: openai.OpenAI) -> None:
    (whole,) = client.embeddings.create(model=MODEL, input=TEXTS[0]).data
    (short,) = client.embeddings.create(model=MODEL, input=TEXTS[0], dimensions=8).data
    (of_ids,) = client.embeddings.create(model=MODEL, input=[5, 6, 7]).data
    assert len(short.embedding) == 8 and len(of_ids.embedding) == len(whole.embedding)
    first = np.array(whole.embedding[:8])
    np.testing.assert_allclose(short.embedding, first / np.linalg.norm(first), atol=1e-5)


def test_base64_holds_the_values_as_float32(embedding: LiveServer) -> None:
    body = {"input": TEXTS[0], "use_activation": False}
    numbers = answer(embedding, "/v1/embeddings", **body)["data"][0]["embedding"]
    text = answer(embedding, "/pooling", **body, encoding_format="base64")["data"][0]["data"]
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(text), "<f4"), numbers)
    assert np.linalg.norm(numbers) > 1.1


def test_scores_are_cosines_and_rankings_follow_them(embedding: LiveServer) -> None:
    query, *documents = TEXTS
    vectors = [
        np.array(one["embedding"])
        for one in answer(embedding, "/v1/embeddings", input=TEXTS)["data"]
    ]
    cosines = [float(vectors[0] @ other) for other in vectors[1:]]
    for path in ("/score", "/v1/score"):
        found = answer(embedding, path, text_1=query, text_2=documents)
        assert [one["score"] for one in found["data"]] == pytest.approx(cosines, abs=1e-5)
    best = max(range(2), key=cosines.__getitem__)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        first, second = answer(
            embedding, path, query=query, documents=[documents[0], {"text": documents[1]}]
        )["results"]
        assert first["index"] == best and second["index"] == 1 - best
        assert first["relevance_score"] == pytest.approx(cosines[best], abs=1e-5)
        assert first["document"] == {"text": documents[best]}
    (only,) = answer(
        embedding, "/rerank", query=query, documents=documents, top_n=1, return_documents=False
    )["results"]
    assert only["index"] == best and "document" not in only


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("/v1/embeddings", {"input": []}, "input", "length >= 1"),
        ("/v1/embeddings", {"input": ["a", [5]]}, "input", "or a list of one of these"),
        ("/v1/embeddings", {"input": [[5], [10**6]]}, "input[1]", "is not a token id"),
        ("/v1/embeddings", {"input": "a", "dimensions": 4096}, "dimensions", "is more than"),
        ("/v1/embeddings", {"input": "a", "stream": True}, "stream", "is not supported"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt", ""),
        ("/v1/embeddings", {"input": "a", "model": "other"}, "model", "is not served here"),
        ("/v1/embeddings", {"input": "a", "priority": 5}, "priority", "has no effect"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a"] * 3}, "text_1", "make no pairs"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "length >= 1"),
    ],
    ids=str,
)
def test_a_wrong_field_is_named(
    path: str, body: dict[str, Any], param: str, says: str, embedding: LiveServer
) -> None:
    error = refusal(embedding, path, 404 if param == "model" else 400, **body)
    assert error["param"].startswith(param) and says in error["message"]


def test_a_prompt_may_have_as_many_tokens_as_the_model_and_no_more(embedding: LiveServer) -> None:
    limit = embedding.http.get("/v1/models").json()["data"][0]["max_model_len"]
    answer(embedding, "/v1/embeddings", input=[5] * limit)
    error = refusal(embedding, "/v1/embeddings", input=[5] * (limit + 1))
    assert error["code"] == "context_length_exceeded"
    assert "an answer needs" not in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/classify", {"input": "a"}),
    ],
    ids=str,
)
def test_a_server_of_embeddings_refuses_other_tasks(
    path: str, body: dict[str, Any], embedding: LiveServer
) -> None:
    error = refusal(embedding, path, **body)
    assert error["code"] == "unsupported_task"


def test_a_server_of_text_refuses_requests_for_vectors(fake: LiveServer) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/embeddings": {"input": "a"},
        "/pooling": {"input": "a"},
        "/classify": {"input": "a"},
        "/score": {"text_1": "a", "text_2": "b"},
        "/rerank": {"query": "a", "documents": ["b"]},
    }
    for path, body in bodies.items():
        error = refusal(fake, path, **body)
        assert error["code"] == "unsupported_task" and "--runner pooling" in error["message"]


def test_metrics_count_prompts_and_load_returns_to_nothing(embedding: LiveServer) -> None:
    before = embedding.metrics()
    answer(embedding, "/v1/embeddings", input=[[5, 6, 7], [8, 9]])
    embedding.until_idle()
    after = embedding.metrics()

    def grown(name: str) -> float:
        return sum(v - before.get(n, 0) for n, v in after.items() if n.startswith(name))

    assert grown("sidestep:prompt_tokens_total") == 5
    assert grown("sidestep:generation_tokens_total") == 0
    assert grown("sidestep:e2e_request_latency_seconds_count") == 2
    assert grown('sidestep:request_success_total{finished_reason="stop"') == 2


def test_classes_have_labels_and_probabilities(make_server: Make) -> None:
    server = heads(make_server)
    found = answer(server, "/classify", input=["a", "b", "a"])["data"]
    for one in found:
        assert one["num_classes"] == 2 and sum(one["probs"]) == pytest.approx(1)
        assert one["label"] == ["bad", "good"][one["probs"][1] > one["probs"][0]]
    assert found[0]["probs"] == found[2]["probs"] != found[1]["probs"]
    raw = answer(server, "/classify", input="a", use_activation=False)["data"][0]["probs"]
    assert np.exp(raw) / np.exp(raw).sum() == pytest.approx(found[0]["probs"], abs=1e-6)
    assert "has 2" in refusal(server, "/score", text_1="a", text_2="b")["message"]
    assert refusal(server, "/v1/embeddings", input="a")["code"] == "unsupported_task"


def test_a_head_of_one_output_reads_query_and_document_together(make_server: Make) -> None:
    server = heads(make_server, id2label={"0": "relevance"})
    found = answer(server, "/rerank", query="ab", documents=["c", "d"])
    assert found["usage"]["prompt_tokens"] == 6
    (joined,) = answer(server, "/classify", input="abd")["data"]
    (of_d,) = [one for one in found["results"] if one["index"] == 1]
    assert joined["label"] is None and 0 < of_d["relevance_score"] < 1
    assert of_d["relevance_score"] == pytest.approx(joined["probs"][0])


def test_a_deadline_and_the_queue_bound_requests_for_vectors(make_server: Make) -> None:
    server = heads(make_server, "--max-num-seqs", "1", "--max-num-queued-reqs", "2", step_ms=400)
    assert refusal(server, "/classify", 503, input="a", deadline_ms=20)["code"] == "aborted"
    assert refusal(server, "/classify", 429, input=["a"] * 8)["code"] == "queue_full"
    server.until_idle()
