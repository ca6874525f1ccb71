"""Tokenizer files and chat templates as they are found in model folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers import AutoTokenizer

from sidestep import DEFAULT_MODEL, EngineStartError, ValidationError
from sidestep.frontend.api.startup import load_tokenizer
from sidestep.frontend.input.chat_template import ChatTemplate
from sidestep.frontend.input.tokenizer import Tokenizer
from sidestep.frontend.options.engine_args import EngineArgs

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <|im_end|> there"},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of the bundled tokenizer, which the test may change."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(DEFAULT_MODEL) / name, tmp_path)
    return tmp_path


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def render(source: str, messages: Any = CHAT, **variables: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(
        messages, add_generation_prompt=True, **variables
    )


def test_a_missing_file_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(
        EngineStartError, match="no tokenizer.json; make one with transformers: AutoTok"
    ) as caught:
        Tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "problem"),
    [("tokenizer.json", "cannot be read"), ("tokenizer_config.json", "is not valid JSON")],
)
def test_a_broken_file_is_named(folder: Path, name: str, problem: str) -> None:
    (folder / name).write_text("{")
    with pytest.raises(EngineStartError, match=f"tokenizer: .*{name} {problem}"):
        Tokenizer(str(folder))


def test_texts_come_back(tokenizer: Tokenizer) -> None:
    text = "def naïve(🦆):\n    return '日本語'\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token_id is not None and tokenizer.eos_token_id in tokenizer.special_ids
    assert len(tokenizer) == tokenizer.vocab_size and "tokens" in repr(tokenizer)


def test_the_truncation_and_padding_of_training_are_not_applied_to_prompts(folder: Path) -> None:
    whole = Tokenizer(str(folder)).encode("def get_name(self): return self.name")
    change(
        folder / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 64},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<|endoftext|>",
        },
    )
    assert Tokenizer(str(folder)).encode("def get_name(self): return self.name") == whole


def test_text_that_is_no_text_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValidationError, match="prompt: is not valid text"):
        tokenizer.encode("\ud83d")


def test_a_chat_is_encoded_with_the_template_s_special_tokens_and_no_others(folder: Path) -> None:
    change(
        folder / "tokenizer.json",
        post_processor={
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 0}},
            ],
            "special_tokens": {
                "<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
            },
        },
    )
    change(
        folder / "tokenizer_config.json",
        chat_template="{{ eos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
    )
    tokenizer = Tokenizer(str(folder))
    assert tokenizer.encode("a")[0] == 0, "a text gets the token"
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=True)
    assert ids == [0, *tokenizer.encode("a", add_special_tokens=False)]


def test_a_template_in_its_own_file_comes_first(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("own file: {{ messages[0].content }}")
    assert Tokenizer(str(folder)).apply_chat_template(CHAT, tokenize=False) == "own file: Be brief."


NAMED = [
    {"name": "rag", "template": "rag"},
    {"name": "default", "template": "the default"},
    {"name": "tool_use", "template": "{{ tools | length }} tools"},
]


@pytest.mark.parametrize("form", ["a list", "files", "files and a list"])
def test_of_several_named_templates_the_one_for_the_use_is_taken_as_transformers_does(
    folder: Path, form: str
) -> None:
    change(folder / "tokenizer_config.json", chat_template=NAMED)
    if form != "a list":
        (folder / "chat_template.jinja").write_text("file")
        more = folder / "additional_chat_templates"
        more.mkdir()
        (more / "tool_use.jinja").write_text("{{ tools | length }} of a file")
    if form == "files":
        change(folder / "tokenizer_config.json", chat_template=None)
    tokenizer, reference = Tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    choices: list[Any] = [None, [], [{"type": "function", "function": {"name": "f"}}]]
    for tools in choices:
        expected = reference.apply_chat_template(CHAT, tools=tools, tokenize=False)
        assert tokenizer.apply_chat_template(CHAT, tools=tools, tokenize=False) == expected
        assert (tokenizer.template_for(tools) == tokenizer.chat_template) == (tools is None)
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == (
        "the default" if form == "a list" else "file"
    )
    tokenizer.chat_template = "one for all"
    assert tokenizer.apply_chat_template(CHAT, tools=[1], tokenize=False) == "one for all"


def test_named_templates_without_a_default_serve_their_use_alone(folder: Path) -> None:
    change(folder / "tokenizer_config.json", chat_template=NAMED[2:])
    tokenizer = Tokenizer(str(folder))
    assert tokenizer.apply_chat_template(CHAT, tools=[1], tokenize=False) == "1 tools"
    with pytest.raises(ValidationError, match="no chat template of the name 'default', only tool_"):
        tokenizer.apply_chat_template(CHAT)


def test_a_processor_s_template_is_taken_where_there_is_no_other(folder: Path) -> None:
    change(folder / "tokenizer_config.json", chat_template=None)
    file = folder / "chat_template.json"
    file.write_text(json.dumps({"chat_template": "a processor's"}))
    assert Tokenizer(str(folder)).apply_chat_template(CHAT, tokenize=False) == "a processor's"
    file.write_text(json.dumps({"chat_template": NAMED}))
    assert Tokenizer(str(folder)).apply_chat_template(CHAT, tokenize=False) == "the default"
    change(folder / "tokenizer_config.json", chat_template="the tokenizer's")
    assert Tokenizer(str(folder)).apply_chat_template(CHAT, tokenize=False) == "the tokenizer's"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "chat_template.json is not valid JSON"),
        ("{}", "chat_template in .*chat_template.json must be text"),
        ("[]", "chat_template in .*chat_template.json must be text"),
    ],
)
def test_a_processor_s_template_that_is_wrong_is_named(
    folder: Path, content: str, problem: str
) -> None:
    change(folder / "tokenizer_config.json", chat_template=None)
    (folder / "chat_template.json").write_text(content)
    with pytest.raises(EngineStartError, match=f"tokenizer: .*{problem}"):
        Tokenizer(str(folder))


def test_the_option_gives_a_template_by_a_file_or_by_itself(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("mine: {{ messages[0].content }}")
    tools: list[Any] = [{"type": "function", "function": {"name": "f"}}]
    for given in (str(file), file, "mine: {{ messages[0].content }}"):
        options: dict[str, Any] = {"chat_template": given}
        tokenizer = load_tokenizer(EngineArgs(**options).create_engine_config())
        for with_tools in (None, tools):
            shown = tokenizer.apply_chat_template(CHAT, tools=with_tools, tokenize=False)
            assert shown == "mine: Be brief."


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("nowhere.jinja", "'nowhere.jinja' is no template, and no file to read: No such file"),
        (DEFAULT_MODEL, "is no template, and no file to read: Is a directory"),
        (f"{DEFAULT_MODEL}/model.safetensors", "no file to read: it is not UTF-8"),
        ("{% for %}", "is not valid: "),
    ],
)
def test_an_option_that_gives_no_template_is_refused_before_anything_starts(
    given: str, problem: str
) -> None:
    with pytest.raises(ValidationError, match=f"^chat_template: .*{problem}") as caught:
        EngineArgs(chat_template=given).create_engine_config()
    assert "\n" not in str(caught.value)
    with pytest.raises(ValidationError, match="^chat_template: needs a tokenizer"):
        EngineArgs(chat_template=given, skip_tokenizer_init=True)


def test_a_template_s_file_that_is_no_text_is_named(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(EngineStartError, match="tokenizer: .*chat_template.jinja cannot be read"):
        Tokenizer(str(folder))


@pytest.mark.parametrize("given", [[{"name": "default"}], 5, ["text"]])
def test_templates_in_another_form_are_refused(folder: Path, given: Any) -> None:
    change(folder / "tokenizer_config.json", chat_template=given)
    words = "chat_template in .*tokenizer_config.json must be text, or a list"
    with pytest.raises(EngineStartError, match=words):
        Tokenizer(str(folder))


def test_without_a_template_a_chat_is_refused(folder: Path) -> None:
    change(folder / "tokenizer_config.json", chat_template=None)
    with pytest.raises(ValidationError, match="messages: this model has no chat template"):
        Tokenizer(str(folder)).apply_chat_template(CHAT, tokenize=False)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "{{ bos_token }}{% if tools is not none %}tools{% endif %}|{{ add_generation_prompt }}",
            "<s>|True",
        ),
        (
            "{% for m in messages %}\n  {% if loop.first %}{% continue %}{% endif %}"
            "{{ m.role }}\n{% endfor %}",
            "user\n",
        ),
        (
            "{% for m in messages %}{% generation %}{{ m.role[0] }}{% endgeneration %}{% endfor %}",
            "su",
        ),
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{{ strftime_now('%Y') | int > 2000 }}", "True"),
    ],
)
def test_what_templates_on_the_hub_rely_on(source: str, expected: str) -> None:
    assert render(source) == expected


def test_variables_reach_the_template() -> None:
    assert (
        render("{{ enable_thinking }} {{ tools[0] }}", enable_thinking=False, tools=["t"])
        == "False t"
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[9].content.x }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    ],
)
def test_what_a_template_raises_is_said_of_the_messages(source: str) -> None:
    with pytest.raises(ValidationError, match="messages: the chat template refuses them"):
        render(source)


def test_templates_are_compiled_before_the_first_conversation(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(
        folder / "tokenizer_config.json",
        chat_template=[
            {"name": "default", "template": "{{ messages[0].content }}"},
            {"name": "tool_use", "template": "{{ tools | length }}"},
        ],
    )
    tokenizer = load_tokenizer(EngineArgs(tokenizer=str(folder)).create_engine_config())
    monkeypatch.setattr(jinja2.Environment, "from_string", None)
    assert tokenizer.render_chat(CHAT) == "Be brief."
    assert tokenizer.render_chat(CHAT, tools=[{}]) == "1"


def test_an_error_in_a_template_is_one_of_the_conversation_that_uses_it(folder: Path) -> None:
    """A model whose template is wrong still completes texts."""
    change(folder / "tokenizer_config.json", chat_template="{{")
    tokenizer = load_tokenizer(EngineArgs(tokenizer=str(folder)).create_engine_config())
    assert tokenizer.encode("Hi")
    with pytest.raises(ValidationError, match="chat_template: is not valid"):
        tokenizer.render_chat(CHAT)


def test_a_template_that_cannot_be_compiled_is_named() -> None:
    with pytest.raises(ValidationError, match="chat_template: is not valid"):
        render("{% for %}")


@pytest.mark.parametrize(
    "messages",
    [
        [],
        ["hi"],
        [{"content": "hi"}],
        [{"role": 1, "content": "hi"}],
        [{"role": "user"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
    ],
)
def test_wrong_messages_are_refused(messages: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        render("x", messages)
    assert caught.value.field == "messages"


def test_parts_of_text_are_joined_and_tool_calls_need_no_content() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb"
    assert (
        render("{{ messages[0].tool_calls }}", [{"role": "assistant", "tool_calls": [1]}]) == "[1]"
    )
