"""LLM over an engine that the test scripts."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest
import tqdm

from sidestep import (
    LLM,
    EngineArgs,
    EngineDeadError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    ValidationError,
)
from sidestep.frontend.api import llm as module
from sidestep.frontend.api.batch import as_list_of_conversations, as_list_of_prompts
from sidestep.frontend.output.outputs import CompletionOutput, RequestMetrics

CHAT = [{"role": "user", "content": "hi"}]


class Engine:
    """A stand-in for AsyncLLM: it answers with the prompt, the later calls first."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, SamplingParams]] = []
        self.priorities: list[int] = []
        self.running = 0
        self.hang = threading.Event()
        self.hanging = threading.Event()
        self.num_shutdowns = 0

    async def generate(
        self, prompt: Any, params: SamplingParams, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        if prompt == "":
            raise ValidationError("prompt", "is empty")
        self.calls.append((prompt, params))
        self.priorities.append(priority)
        self.running += 1
        try:
            for _ in range(20 - len(self.calls)):
                await asyncio.sleep(0)
            if self.hang.is_set():
                self.hanging.set()
                await asyncio.get_running_loop().create_future()
            yield RequestOutput(
                "",
                None,
                [1, 2],
                [CompletionOutput(0, str(prompt), [3], "stop")],
                True,
                RequestMetrics(0.0),
            )
        finally:
            self.running -= 1

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(top_k=7)

    async def get_stats(self) -> dict[str, float]:
        return {"num_running": float(self.running)}

    def shutdown(self) -> None:
        self.num_shutdowns += 1


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()

    class Factory:
        @classmethod
        def from_engine_args(cls, arguments: EngineArgs) -> Engine:
            return engine

    monkeypatch.setattr(module, "AsyncLLM", Factory)
    return engine


@pytest.fixture
def llm(engine: Engine) -> Iterator[LLM]:
    with LLM() as llm:
        yield llm


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_results_come_in_the_order_of_the_prompts(llm: LLM, engine: Engine) -> None:
    assert texts(llm.generate(["a", "b", "c"], SamplingParams(max_tokens=3), use_tqdm=False)) == [
        "a",
        "b",
        "c",
    ]
    assert all(
        p.output_kind == RequestOutputKind.FINAL_ONLY and p.max_tokens == 3 for _, p in engine.calls
    )


def test_one_prompt_is_a_list_of_one_and_none_is_empty(llm: LLM) -> None:
    assert texts(llm.generate("a", use_tqdm=False)) == ["a"]
    assert llm.generate([], use_tqdm=False) == []


def test_each_prompt_may_have_its_own_parameters(llm: LLM, engine: Engine) -> None:
    llm.generate(
        ["a", "b"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)], use_tqdm=False
    )
    assert [params.max_tokens for _, params in engine.calls] == [1, 2]
    with pytest.raises(ValidationError, match="sampling_params: has 1 entries for 2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()], use_tqdm=False)


def test_the_bar_shows_tokens_in_and_out(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"])
    err = capsys.readouterr().err
    assert "2/2" in err and "tok/s" in err and "in " in err and "out " in err
    llm.generate(["a", "b"], None, False)
    assert capsys.readouterr().err == ""


def test_chats_are_one_conversation_or_many(llm: LLM, engine: Engine) -> None:
    llm.chat(CHAT, use_tqdm=False)
    llm.chat([CHAT, CHAT], use_tqdm=False)
    assert [prompt["messages"] for prompt, _ in engine.calls] == [CHAT] * 3


@pytest.mark.parametrize(
    "messages", ["hi", [], ["hi"], [CHAT, []], [CHAT, "hi"], {"role": "user"}, 5]
)
def test_what_is_no_chat_is_refused(messages: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        as_list_of_conversations(messages)
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("a", ["a"]),
        ([1, 2], [[1, 2]]),
        (CHAT, [CHAT]),
        ({"prompt": "a"}, [{"prompt": "a"}]),
        (["a", [1]], ["a", [1]]),
        (
            [{"prompt": "a"}, {"prompt_token_ids": [1]}],
            [{"prompt": "a"}, {"prompt_token_ids": [1]}],
        ),
    ],
)
def test_what_counts_as_one_prompt(prompts: Any, expected: list[Any]) -> None:
    assert as_list_of_prompts(prompts) == expected


def test_a_wrong_prompt_raises_and_ends_the_others(llm: LLM, engine: Engine) -> None:
    engine.hang.set()
    with pytest.raises(ValidationError, match=r"^prompts\[1\]: is empty$") as refusal:
        llm.generate(["a", "", "b"], use_tqdm=False)
    assert refusal.value.field == "prompts[1]"
    assert llm.get_stats() == {"num_running": 0.0}


def test_an_interrupt_ends_the_requests(
    llm: LLM, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.hang.set()

    class Interrupted:
        """The result of run_coroutine_threadsafe, with Ctrl-C while waiting for it."""

        def __init__(self, future: Any) -> None:
            self._future = future

        def result(self) -> None:
            assert engine.hanging.wait(30)
            raise KeyboardInterrupt

        def cancel(self) -> None:
            self._future.cancel()

    real = asyncio.run_coroutine_threadsafe
    with monkeypatch.context() as patch:
        patch.setattr(
            asyncio, "run_coroutine_threadsafe", lambda c, loop: Interrupted(real(c, loop))
        )
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b"], use_tqdm=False)
    while llm.get_stats()["num_running"]:
        pass
    assert len(engine.calls) == 2


def test_it_may_be_shut_down_twice_and_says_so_afterwards(engine: Engine) -> None:
    llm = LLM()
    llm.shutdown()
    llm.shutdown()
    assert engine.num_shutdowns == 1
    with pytest.raises(EngineDeadError, match="has been shut down"):
        llm.generate("a", use_tqdm=False)


def test_one_that_is_forgotten_ends_with_its_thread(engine: Engine) -> None:
    llm = LLM()
    llm.generate("a", use_tqdm=False)
    thread = llm._thread
    del llm
    gc.collect()
    assert engine.num_shutdowns == 1 and not thread.is_alive()


def test_works_where_an_event_loop_runs_already(llm: LLM) -> None:
    async def main() -> list[RequestOutput]:
        return llm.generate("a", use_tqdm=False)

    assert texts(asyncio.run(main())) == ["a"]


def test_unknown_options_are_named(engine: Engine) -> None:
    with pytest.raises(TypeError, match="tensor_paralel_size"):
        LLM(tensor_paralel_size=2)
    with pytest.raises(ValidationError, match="max_num_seqs"):
        LLM(max_num_seqs=0)


def test_prompts_parameters_and_priorities_may_be_of_any_kind(llm: LLM, engine: Engine) -> None:
    each: list[Any] = [{"max_tokens": 1}, SamplingParams(max_tokens=2)]
    outputs = llm.generate(
        (p for p in ("a", "b")), (p for p in each), use_tqdm=False, priority=[3, -1]
    )
    assert texts(outputs) == ["a", "b"]
    assert [params.max_tokens for _, params in engine.calls] == [1, 2] and engine.priorities == [
        3,
        -1,
    ]
    with pytest.raises(ValidationError, match="priority: has 1 entries for 2 prompts"):
        llm.generate(["a", "b"], use_tqdm=False, priority=[1])
    with pytest.raises(ValidationError, match="prompts: must be prompts or a single one, not int"):
        llm.generate(5)  # type: ignore[arg-type]  # not a prompt
    with pytest.raises(ValidationError, match="prompt_token_ids: are given within the prompt"):
        llm.generate(prompt_token_ids=[[1, 2]])  # type: ignore[call-arg]  # an older name


def test_a_chat_carries_what_its_template_is_given(llm: LLM, engine: Engine) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    llm.chat(
        [CHAT, CHAT],
        None,
        False,
        tools=tools,
        chat_template="t",
        chat_template_kwargs={"a": 1},
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert [prompt for prompt, _ in engine.calls] == 2 * [
        {
            "messages": CHAT,
            "tools": tools,
            "chat_template": "t",
            "chat_template_kwargs": {"a": 1},
            "add_generation_prompt": False,
            "continue_final_message": True,
        }
    ]


def test_the_bar_may_be_of_another_make(llm: LLM) -> None:
    totals = []

    class Bar(tqdm.tqdm):  # type: ignore[misc]  # tqdm has no types
        def __init__(self, **options: Any) -> None:
            totals.append(options["total"])
            super().__init__(**options)

    llm.generate(["a", "b"], use_tqdm=Bar)
    assert totals == [2]


def test_it_is_made_of_engine_args_too(engine: Engine) -> None:
    with LLM.from_engine_args(EngineArgs(max_num_seqs=3)) as llm:
        assert llm.get_default_sampling_params().top_k == 7
