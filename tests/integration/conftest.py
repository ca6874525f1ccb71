"""Engines with real processes on the fake device.

Their model folder holds only a config and a tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sidestep import AsyncLLM, EngineArgs

VOCAB_SIZE = 512


@pytest.fixture(scope="session")
def fake_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder without weights, which the fake device can serve."""
    folder = tmp_path_factory.mktemp("fake-model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        ["def get_name(self):\n    return self.name\n"] * 9,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=["<eos>"],
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
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


@pytest_asyncio.fixture
async def make_llm(fake_model: str) -> AsyncIterator[Callable[..., AsyncLLM]]:
    """Return a function that makes engines; all are shut down after the test."""
    made: list[AsyncLLM] = []

    def make(**options: Any) -> AsyncLLM:
        made.append(
            AsyncLLM.from_engine_args(
                EngineArgs(**{"model": fake_model, "device": "fake", **options})
            )
        )
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()


@pytest_asyncio.fixture
async def tiny_llm() -> AsyncIterator[AsyncLLM]:
    """Yield an engine with the bundled model on the default device."""
    async with AsyncLLM.from_engine_args(EngineArgs()) as llm:
        yield llm
