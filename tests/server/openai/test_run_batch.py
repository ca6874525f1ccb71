"""`sidestep run-batch`: files in OpenAI's batch format, answered by the server's routes."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sidestep import AsyncLLM, EngineArgs, EngineDeadError
from sidestep.frontend.options.serve_options import ServerArgs
from sidestep.frontend.server.batch import answer_all
from sidestep.frontend.server.batch_file import BatchRequest, BatchResult
from tests.processes import run
from tests.server.live import ROOT

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def line(custom_id: str, body: dict[str, Any], url: str = TEXT, **more: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body, **more})


class Batch:
    """Runs of the command on files of its own."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.input, self.output = folder / "input.jsonl", folder / "output.jsonl"
        self._words = words
        self.err = ""

    def run(self, *lines: str, more: tuple[str, ...] = ()) -> int:
        """Run the command on these lines and return its exit status."""
        self.input.write_text("".join(each + "\n" for each in lines))
        files = ("-i", str(self.input), "-o", str(self.output))
        done = run(
            *(sys.executable, "-m", "sidestep", "run-batch", *files, *self._words, *more), cwd=ROOT
        )
        assert done.stdout == ""
        self.err = done.stderr
        return done.returncode

    def results(self) -> list[dict[str, Any]]:
        return [json.loads(each) for each in self.output.read_text("utf-8").splitlines()]

    def ids(self) -> list[str | None]:
        return [each["custom_id"] for each in self.results()]


@pytest.fixture
def batch(fake_model: str, tmp_path: Path) -> Batch:
    return Batch(
        tmp_path,
        fake_model,
        "--served-model-name",
        "fake",
        "--device",
        "fake",
        "--fake-step-ms",
        "1",
    )


def test_the_answers_are_those_of_the_routes_and_come_as_they_end(batch: Batch) -> None:
    long = line("long", {"prompt": "hi", "max_tokens": 500, "ignore_eos": True})
    short = line("short", {"model": "fake", "messages": MESSAGES, "max_tokens": 1}, CHAT)
    assert batch.run(long, "", short) == 0
    assert batch.err.endswith(f"2 requests in {batch.output}: 2 answered, 0 failed\n")
    first, second = batch.results()
    assert list(first) == ["id", "custom_id", "response", "error"]
    assert (first["custom_id"], second["custom_id"]) == ("short", "long") and first["id"] != second[
        "id"
    ]
    assert first["error"] is None and first["response"]["status_code"] == 200
    assert first["response"]["body"]["object"] == "chat.completion"
    assert first["response"]["body"]["id"] == first["response"]["request_id"]
    assert second["response"]["body"]["usage"]["completion_tokens"] == 500


def test_an_answer_is_one_line_for_readers_that_know_the_line_ends_of_unicode(batch: Batch) -> None:
    prompt = "one\u2028two\u2029three\x85four\N{PILE OF POO}"
    assert batch.run(line("echo", {"prompt": prompt, "echo": True, "max_tokens": 1})) == 0
    (answer,) = batch.results()
    assert answer["response"]["body"]["choices"][0]["text"].startswith(prompt)


def test_what_cannot_be_run_is_an_error_of_its_line_and_the_others_go_on(batch: Batch) -> None:
    good = {"prompt": "hi", "max_tokens": 1}
    cases = [
        ("{nonsense", None, "the line is not valid JSON"),
        ('{"method": "POST"}', None, "missing required field `custom_id`"),
        (line("extra", good, colour="red"), "extra", "unknown field `colour`"),
        (line("get", good, method="GET"), "get", "method: must be 'POST', not 'GET'"),
        (line("url", good, "/v1/embeddings"), "url", "url: must be one of"),
        (line("stream", {**good, "stream": True}), "stream", "body.stream: "),
        (line("fine", good), "fine", "custom_id: a line before has 'fine' too"),
    ]
    fine, lines = line("fine", {**good, "stream": False}), [each for each, _, _ in cases]
    assert batch.run(fine, *lines) == 1
    assert batch.err.endswith(f"8 requests in {batch.output}: 1 answered, 7 failed\n")
    results = batch.results()
    for number, (result, (_, custom_id, message)) in enumerate(
        zip(results, cases, strict=False), 2
    ):
        assert result["custom_id"] == custom_id and result["response"] is None
        assert message in result["error"]["message"] and result["error"]["line"] == number
    assert results[-1]["response"]["status_code"] == 200

    # The second run answers no line twice, and the failures still count. A corrected line is run.
    assert batch.run(fine, *lines) == 1 and len(batch.results()) == 8
    assert (
        batch.err == f"8 requests in {batch.output}: 1 answered, 7 failed; 8 were there already\n"
    )
    assert batch.run(fine, line("mended", good), *lines[1:]) == 1 and batch.ids()[8:] == ["mended"]


def test_a_refusal_by_the_route_is_its_answer_and_no_success(batch: Batch) -> None:
    assert (
        batch.run(
            line("a", {"prompt": "hi", "colour": "red"}),
            line("b", {"prompt": "hi", "model": "other"}),
        )
        == 1
    )
    results = {each["custom_id"]: each["response"] for each in batch.results()}
    assert [results[name]["status_code"] for name in "ab"] == [400, 404]
    assert results["a"]["body"]["error"]["param"] == "colour" and results["a"]["request_id"]
    assert "0 answered, 2 failed" in batch.err


def test_a_run_goes_on_where_the_last_one_was_ended(batch: Batch) -> None:
    lines = [line(name, {"prompt": "hi", "max_tokens": 1}) for name in "abc"]
    assert batch.run(*lines[:2]) == 0
    whole = batch.output.read_bytes()
    batch.output.write_bytes(whole[:-20])  # ended while it wrote
    last = json.loads(whole.splitlines()[-1])["custom_id"]
    assert batch.run(*lines) == 0
    assert batch.output.read_bytes().startswith(whole.splitlines(keepends=True)[0])
    assert sorted(str(name) for name in batch.ids()[1:]) == sorted([last, "c"])
    assert "3 answered, 0 failed; 1 were there already" in batch.err
    # With nothing left to do no engine is started.
    assert batch.run(*lines) == 0 and "starting" not in batch.err


@pytest.mark.parametrize("text", ["notes\n", "notes", '{"custom_id": "a", "method": "POST"}\n'])
def test_another_file_is_not_touched(text: str, batch: Batch) -> None:
    batch.output.write_text(text)
    assert batch.run(line("a", {"prompt": "hi"})) == 1
    assert batch.output.read_text() == text and "sidestep: output_file: line 1 of" in batch.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--max-concurrency", "0"), "max_concurrency: must be at least 1"),
        (("--max-num-queued-reqs", "5"), "max_num_queued_reqs: would refuse lines of the batch"),
        (("--port", "8000"), "unknown option --port"),
        (("-o", "input.jsonl"), "output_file: is the input"),
        (("-i", "nowhere.jsonl"), "No such file or directory: 'nowhere.jsonl'"),
    ],
)
def test_senseless_flags_are_refused_by_name(
    words: tuple[str, ...], message: str, batch: Batch
) -> None:
    words = tuple(str(batch.input) if word == "input.jsonl" else word for word in words)
    assert batch.run(line("a", {"prompt": "hi"}), more=words) != 0
    assert message in batch.err and not batch.output.exists()


# Run in this process, to look at the engine meanwhile.


def requests(*bodies: dict[str, Any]) -> list[BatchRequest]:
    return [
        BatchRequest(
            str(i), "POST", TEXT, msgspec.Raw(msgspec.json.encode({"prompt": "hi", **body}))
        )
        for i, body in enumerate(bodies)
    ]


async def test_as_many_run_at_once_as_may(fake_model: str) -> None:
    results: list[BatchResult] = []
    async with AsyncLLM.from_engine_args(
        EngineArgs(model=fake_model, device="fake", fake_step_ms=1)
    ) as llm:
        await answer_all(
            llm, ServerArgs(), ("fake",), requests(*[{"max_tokens": 20}] * 10), 3, results.append
        )
        assert max(step.num_rows for step in await llm.get_step_records()) == 3
    assert sorted(result.custom_id or "" for result in results) == [str(i) for i in range(10)]
    assert all(result.succeeded for result in results)


async def test_requests_that_ran_when_the_engine_died_have_no_result(fake_model: str) -> None:
    results: list[BatchResult] = []
    async with AsyncLLM.from_engine_args(
        EngineArgs(model=fake_model, device="fake", fake_step_ms=1, restart_limit=0)
    ) as llm:

        def take(result: BatchResult) -> None:
            results.append(result)
            os.kill(llm.core_pid, signal.SIGKILL)

        long = {"max_tokens": 2000, "ignore_eos": True}
        with pytest.raises(EngineDeadError):
            await answer_all(
                llm, ServerArgs(), ("fake",), requests(long, {"max_tokens": 1}, long), 8, take
            )
    assert [result.custom_id for result in results] == ["1"]
