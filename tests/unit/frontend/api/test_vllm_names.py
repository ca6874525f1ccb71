"""Scripts for vLLM: their imports, calls and command lines."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sidestep
from sidestep import LLM, AsyncLLM, EngineArgs, SamplingParams, UnsupportedError, ValidationError
from sidestep.frontend.input.tokenizer import Tokenizer
from sidestep.frontend.main import main, make_parser
from sidestep.frontend.options.flags import server_args
from sidestep.frontend.vllm.vllm_names import takes_vllm_arguments
from sidestep.inputs import TextPrompt, TokensPrompt
from sidestep.ipc.vllm.calls import ARGUMENTS, METHODS, TOKENIZER_METHODS
from sidestep.ipc.vllm.imports import MODULES, NAMES
from sidestep.ipc.vllm.options import ENGINE_OPTIONS, SERVER_OPTIONS
from sidestep.utils import FlexibleArgumentParser, random_uuid
from tests.unit.frontend.fakes import FakeChannel, input_processor

ROOT = Path(__file__).resolve().parents[4]
FACADE = sorted(
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for file in (ROOT / "sidestep").rglob("*.py")
    if not (ROOT / "sidestep" / file.relative_to(ROOT / "sidestep").parts[0]).is_symlink()
    and not file.name.startswith("__")
)
CHAT = [{"role": "user", "content": "Hello"}]


# Imports.


@pytest.mark.parametrize("module", FACADE)
def test_a_module_has_what_it_says_and_names_what_it_lacks(module: str) -> None:
    found = importlib.import_module(module)
    for name in getattr(found, "__all__", ()):
        assert getattr(found, name) is not None
    for missing, instead in NAMES.items():
        if "__all__" in vars(found):
            with pytest.raises(ModuleNotFoundError) as caught:
                exec(f"from {module} import {missing}")
            assert str(caught.value) == f"{module}.{missing}: {instead}"


@pytest.mark.parametrize("below", ["", ".anything"])
@pytest.mark.parametrize("name", MODULES)
def test_a_module_that_does_not_exist_says_what_there_is(name: str, below: str) -> None:
    if (
        ROOT / "sidestep" / f"{name}{below}".replace(".", "/")
    ).is_dir() or f"sidestep.{name}{below}" in FACADE:
        return  # it stands for the modules below it
    with pytest.raises(ModuleNotFoundError, match=r"^sidestep\.\S+: ") as caught:
        importlib.import_module(f"sidestep.{name}{below}")
    assert caught.value.name is None


def test_a_name_that_the_package_does_not_have_says_what_there_is() -> None:
    for name in NAMES:
        with pytest.raises(ImportError, match=f"^sidestep.{name}: "):
            exec(f"from sidestep import {name}")
        assert not hasattr(sidestep, name)
        with pytest.raises(AttributeError, match=f"no attribute '{name}': "):
            getattr(sidestep, name)


def test_what_no_one_has_is_an_ordinary_error() -> None:
    with pytest.raises(ImportError, match="cannot import name 'nonsense' from 'sidestep'"):
        exec("from sidestep import nonsense")
    with pytest.raises(ModuleNotFoundError, match="No module named 'sidestep.nonsense'"):
        importlib.import_module("sidestep.nonsense")


def test_older_names_are_the_same_things() -> None:
    from sidestep.engine.arg_utils import AsyncEngineArgs
    from sidestep.engine.async_llm_engine import AsyncLLMEngine
    from sidestep.entrypoints.llm import LLM as AliasOfLLM
    from sidestep.v1.engine.async_llm import AsyncLLM as AliasOfAsyncLLM

    assert AsyncLLMEngine is AliasOfAsyncLLM is AsyncLLM is sidestep.AsyncLLMEngine
    assert AsyncEngineArgs is EngineArgs is sidestep.AsyncEngineArgs and AliasOfLLM is LLM
    assert len({random_uuid() for _ in range(9)}) == 9


def test_the_server_starts_by_its_module_too() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sidestep.entrypoints.openai.api_server", "--swap-space", "4"],
        capture_output=True,
        text=True,
    )
    assert (
        done.returncode == 1
        and done.stderr == f"sidestep: swap_space: {ENGINE_OPTIONS['swap_space'].instead}\n"
    )


# Calls.


@pytest.mark.parametrize("cls", [LLM, AsyncLLM])
def test_a_method_that_does_not_exist_says_what_there_is(cls: type[LLM | AsyncLLM]) -> None:
    llm = cls.__new__(cls)
    for name in METHODS:
        assert not hasattr(llm, name)
        with pytest.raises(UnsupportedError) as caught:
            getattr(llm, name)
        assert str(caught.value) == f"{cls.__name__}.{name}: {METHODS[name]}"
        assert isinstance(caught.value, NotImplementedError)


def test_any_other_attribute_is_an_ordinary_error(tokenizer: Tokenizer) -> None:
    things: list[Any] = [LLM.__new__(LLM), tokenizer]
    for thing in things:
        with pytest.raises(
            AttributeError, match=f"'{type(thing).__name__}' object has no attribute 'nonsense'"
        ):
            thing.nonsense  # noqa: B018
    for name in TOKENIZER_METHODS:
        with pytest.raises(UnsupportedError, match=f"Tokenizer.{name}: "):
            getattr(tokenizer, name)


def test_arguments_are_dropped_where_they_ask_for_nothing_and_named_otherwise() -> None:
    @takes_vllm_arguments
    def call(prompt: str, *, priority: int = 0, truncation: str = "ours") -> tuple[str, int, str]:
        return prompt, priority, truncation

    loose: Any = call
    for name, foreign in ARGUMENTS.items():
        if name == "truncation":
            continue
        for value in (None, *foreign.accepted):
            assert loose("a", priority=2, **{name: value}) == ("a", 2, "ours")
        with pytest.raises(ValidationError) as caught:
            loose("a", **{name: object()})
        assert str(caught.value) == f"{name}: {foreign.instead}"
    assert call("a", truncation="given") == ("a", 0, "given"), (
        "its own argument of such a name is its own"
    )
    with pytest.raises(TypeError, match="nonsense"):
        loose("a", nonsense=1)


async def test_an_engine_is_called_as_vllm_s(llm: AsyncLLM, channel: FakeChannel) -> None:
    loose: Any = llm
    stream = loose.generate(
        "import ",
        {"max_tokens": 3, "temperature": 0},
        "r1",
        lora_request=None,
        trace_headers=None,
        priority=0,
    )
    waiting = asyncio.ensure_future(anext(stream))
    while not channel.added:
        await asyncio.sleep(0)
    assert channel.added[0].request_id == "r1" and channel.added[0].sampling.max_tokens == 3
    waiting.cancel()
    with pytest.raises(ValidationError, match="lora_request: LoRA"):
        loose.generate("import ", SamplingParams(), "r2", lora_request="adapter")
    with pytest.raises(ValidationError, match="runner: this engine generates text"):
        await anext(loose.encode("text", None, "r3"))
    assert await loose.get_tokenizer() is loose.get_tokenizer()


async def test_a_chat_reaches_the_template_with_all_that_goes_with_it(
    llm: AsyncLLM, channel: FakeChannel
) -> None:
    template = (
        "{{ tools[0].function.name if tools else '' }}|{{ mood }}|{{ messages[-1].content }}"
        "{% if add_generation_prompt %}|go{% endif %}<end>"
    )
    prompts = list[Any]()
    cases: list[dict[str, Any]] = [
        {
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "chat_template_kwargs": {"mood": "x"},
        },
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
    ]
    for more in cases:
        stream = llm.chat(CHAT, {"max_tokens": 1}, chat_template=template, **more)
        waiting = asyncio.ensure_future(anext(stream))
        while len(channel.added) <= len(prompts):
            await asyncio.sleep(0)
        sent = list(memoryview(channel.added[-1].prompt_token_ids).cast("i"))
        prompts.append(llm.get_tokenizer().decode(sent))
        waiting.cancel()
    assert prompts == ["f|x|Hello|go<end>", "||Hello<end>", "||Hello"]


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"tools": "f"}, "tools"),
        ({"tools": [len]}, "tools"),
        ({"chat_template": 5}, "chat_template"),
        ({"chat_template": "{{"}, "chat_template"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"nonsense": 1}, "prompt"),
        ({"continue_final_message": True}, "continue_final_message"),
        (
            {
                "continue_final_message": True,
                "add_generation_prompt": False,
                "chat_template": "none",
            },
            "continue_final_message",
        ),
        (
            {
                "continue_final_message": True,
                "add_generation_prompt": False,
                "messages": [{"role": "assistant", "content": ""}],
            },
            "continue_final_message",
        ),
        ({"messages": "hello"}, "messages"),
        ({"messages": []}, "messages"),
    ],
)
async def test_what_is_wrong_with_a_chat_is_named(
    tokenizer: Tokenizer, more: dict[str, Any], field: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        await input_processor(tokenizer).process({"messages": CHAT, **more}, None)
    assert caught.value.field == field


async def test_prompts_in_vllm_s_forms(tokenizer: Tokenizer) -> None:
    process = input_processor(tokenizer).process
    text = await process(TextPrompt(prompt="a", cache_salt="s"), None)
    assert text.prompt == "a" and text.cache_salt == "s"
    both = await process(TokensPrompt(prompt_token_ids=[5, 6], prompt="as it was written"), None)
    assert both.prompt == "as it was written" and both.prompt_token_ids == [5, 6]
    assert (await process({"prompt": "a", "multi_modal_data": None}, None)).prompt == "a"
    with pytest.raises(ValidationError, match="multi_modal_data: only text goes into a model"):
        await process({"prompt": "a", "multi_modal_data": {"image": 1}}, None)
    with pytest.raises(
        ValidationError,
        match="temprature: is not a field of SamplingParams; did you mean temperature",
    ):
        await process("a", {"temprature": 1})


async def test_the_engine_s_seed_repeats_a_program_and_leaves_requests_seeds_alone(
    tokenizer: Tokenizer,
) -> None:
    async def seeds(seed: str | None) -> list[int | None]:
        inputs = input_processor(tokenizer, seed=seed)
        given = [
            SamplingParams(),
            SamplingParams(seed=5),
            SamplingParams(),
            SamplingParams(temperature=0),
        ]
        return [(await inputs.process("a", params)).sampling.seed for params in given]

    first, own, second, greedy = await seeds("7:0")
    assert first != second and own == 5 and greedy == 0
    assert await seeds("7:0") == [first, own, second, greedy]
    other = await seeds("7:1")
    assert other[0] not in (first, second), "another frontend of the same engine draws others"
    assert (await seeds(None))[0] != (await seeds(None))[0]


async def test_a_priority_that_would_do_nothing_is_refused(llm: AsyncLLM) -> None:
    with pytest.raises(
        ValidationError, match="priority: counts only with the engine's option scheduling_policy"
    ):
        await anext(llm.generate("a", priority=1))


# The tokenizer.


def test_many_templates_of_calls_do_not_pile_up(tokenizer: Tokenizer) -> None:
    for i in range(100):
        assert tokenizer.render_chat(CHAT, chat_template=f"{i}") == f"{i}"
    assert len(tokenizer._compiled) <= 32


# The command line.


def test_each_flag_of_vllm_serve_is_one_sentence() -> None:
    parser = make_parser("1")
    for name, foreign in (ENGINE_OPTIONS | SERVER_OPTIONS).items():
        flag, wrong = name.replace("_", "-"), not foreign.asks_for_nothing(True)
        words = (
            [f"--{flag}", "[7, 8]"]
            if foreign.form != "switch"
            else [f"--{flag}" if wrong else f"--no-{flag}"]
        )
        if foreign.same_as is not None or (
            foreign.form == "switch" and not wrong and foreign.asks_for_nothing(False)
        ):
            continue
        parsed = parser.parse_args(["serve", "model", *words])
        with pytest.raises(ValidationError) as caught:
            server_args(parsed), EngineArgs.from_cli_args(parsed)
        assert str(caught.value) == f"{name}: {foreign.instead}"


@pytest.mark.parametrize(
    "words",
    [
        ["--swap-space", "4"],
        ["--api-key", "key"],
        ["--swap_space=4"],
        ["-cc", "3"],
        ["-O3"],
        ["--enable-eplb"],
        ["-tp", "2", "--nnodes", "2"],
    ],
)
def test_flags_in_other_forms(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "model", *words]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_help_shows_our_options_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    assert "swap-space" not in capsys.readouterr().out


@pytest.mark.parametrize("parser", [argparse.ArgumentParser(), FlexibleArgumentParser()])
def test_programs_have_the_flags_of_the_engine(parser: argparse.ArgumentParser) -> None:
    EngineArgs.add_cli_args(parser).add_argument("--own", default=1)
    parsed = parser.parse_args(
        ["--max-model-len", "1k", "--dtype", "half", "--num-gpu-blocks-override", "9"]
    )
    assert EngineArgs.from_cli_args(parsed) == EngineArgs(
        max_model_len=1024, dtype="float16", num_kv_blocks=9
    )
    with pytest.raises(ValidationError, match="hf_token: "):
        EngineArgs.from_cli_args(parser.parse_args(["--hf-token", "mine"]))
    assert vars(parser.parse_args([])) == {"own": 1}
