"""Live servers, and Chromium for their page.

The servers have the bundled model, the fake device, or options of a test.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

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


@pytest.fixture(scope="session")
def tiny() -> Iterator[LiveServer]:
    """Yield a server with the bundled model."""
    with LiveServer() as server:
        yield server


@pytest.fixture(scope="session")
def fake(fake_model: str) -> Iterator[LiveServer]:
    """Yield a server on the fake device, with steps of a millisecond."""
    with LiveServer(
        fake_model, "--served-model-name", "fake", "--device", "fake", "--fake-step-ms", "1"
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
