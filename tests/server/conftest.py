"""Live servers, and Chromium for their page.

The servers have the bundled model, the fake device, or options of a test.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from sidestep.ipc.config_sections import DEFAULT_MODEL
from sidestep.ipc.model.generation_config import FILE
from tests.server.live import LiveServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.server.page.browser import Open

TEMPLATE = """{% for tool in tools or [] %}<tool>{{ tool | tojson }}</tool>{% endfor %}\
{% for message in messages %}<{{ message.role }}>{{ message.content }}{% if message.tool_calls %}\
{% for call in message.tool_calls %}\
[{{ call.function.name }} {{ call.function.arguments.city }}]{% endfor %}\
{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


@pytest.fixture(scope="session")
def fake_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder that the fake device can serve.

    It has a token for each byte, the marks of Mistral's calls, a chat template with tools, and no
    weights.
    """
    folder = tmp_path_factory.mktemp("fake-model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [],
        trainers.BpeTrainer(
            special_tokens=["<eos>"],
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<eos>", "chat_template": TEMPLATE})
    )
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "vocab_size": tokenizer.get_vocab_size(),
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 2048,
                "rms_norm_eps": 1e-6,
                "torch_dtype": "float32",
                "eos_token_id": 0,
            }
        )
    )
    return str(folder)


def short(folder: Path, **defaults: Any) -> list[str]:
    """Return the options of a server whose answers are short unless a request says more.

    Without a limit a chat's length would be chance: up to all the tokens that the model can take,
    which last longer on a busy machine than a test may. defaults: other sampling parameters.
    """
    (folder / FILE).write_text(json.dumps({**defaults, "max_new_tokens": 48}))
    return ["--generation-config", str(folder), "--seed", "0"]


@pytest.fixture(scope="session")
def short_answers(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the options with which the bundled model gives one short answer to one request.

    It samples greedily where a request says nothing else.
    """
    own = json.loads((Path(DEFAULT_MODEL) / FILE).read_text())
    return short(tmp_path_factory.mktemp("defaults"), **{**own, "temperature": 0})


@pytest.fixture(scope="session")
def tiny(short_answers: list[str]) -> Iterator[LiveServer]:
    """Yield a server with the bundled model and short answers."""
    with LiveServer(*short_answers) as server:
        yield server


@pytest.fixture(scope="session")
def fake(fake_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Yield a server on the fake device, with steps of a millisecond and short answers."""
    with LiveServer(
        *(fake_model, "--served-model-name", "fake", "--device", "fake", "--fake-step-ms", "1"),
        *short(tmp_path_factory.mktemp("defaults")),
    ) as server:
        yield server


@pytest.fixture(scope="session")
def embedding() -> Iterator[LiveServer]:
    """Yield a server that makes embeddings with the bundled model."""
    with LiveServer(
        "--runner", "pooling", "--hf-overrides", '{"is_matryoshka": true}', "--cpu-threads", "1"
    ) as server:
        yield server


@pytest.fixture
def make_server(fake_model: str) -> Iterator[Callable[..., LiveServer]]:
    """Return a function that makes servers on the fake device; all are ended after the test."""
    made: list[LiveServer] = []

    def make(*words: str, step_ms: float = 1, **options: Any) -> LiveServer:
        made.append(
            LiveServer(
                fake_model,
                "--served-model-name",
                "fake",
                "--device",
                "fake",
                "--fake-step-ms",
                str(step_ms),
                *words,
                **options,
            )
        )
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Yield Chromium for the tests of one file.

    Playwright runs an event loop, which must end before tests of other files run theirs.
    """
    from tests.server.page.browser import (
        launched_chromium,  # only the tests of the page load Playwright
    )

    with launched_chromium() as browser:
        yield browser


@pytest.fixture
def open_page(chromium: Browser, make_server: Callable[..., LiveServer]) -> Iterator[Open]:
    """Yield a function that opens a server's page.

    An error on the page fails the test. Pages are closed before the servers of `make_server` are.
    """
    from tests.server.page.browser import page_opener

    with page_opener(chromium) as open_page:
        yield open_page
