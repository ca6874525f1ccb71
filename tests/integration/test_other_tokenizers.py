"""Engines whose model has a tokenizer of another kind than tokenizer.json."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sidestep import AsyncLLM, SamplingParams, SidestepError, StructuredOutputsParams
from sidestep.executor.processes.tokenizer_converter import convert
from tests.other_tokenizers import PLAIN, VOCAB_SIZE, train

SCRIPT = """
import sys
from sidestep import LLM, SamplingParams, StructuredOutputsParams

with LLM(sys.argv[1], device="fake", seed=0) as llm:
    form = StructuredOutputsParams(regex="[a-z ]{20}🦆")
    params = SamplingParams(max_tokens=60, structured_outputs=form)
    (out,) = llm.generate("Hello 🦆", params, use_tqdm=False)
    ids, made, tokenizer = out.prompt_token_ids, out.outputs[0], llm.get_tokenizer()
    print(ids == tokenizer.encode("Hello 🦆"), ids[0])
    print(tokenizer.decode(ids + made.token_ids, True) == tokenizer.decode(ids, True) + made.text)
    print(made.finish_reason, len(made.text), made.text[20:])
    print([name for name in ("torch", "transformers") if name in sys.modules])
"""


def test_texts_and_grammars_work_and_no_frontend_imports_transformers(
    fake_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    reader = train(folder, model_type="bpe", **PLAIN)
    config = json.loads((Path(fake_model) / "config.json").read_text())
    config |= {"vocab_size": VOCAB_SIZE, "eos_token_id": reader.eos_id(), "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True 1", "True", "stop 21 🦆", "[]"]


async def test_a_grammar_that_a_tokenizer_cannot_serve_is_refused_in_one_line(
    fake_model: str, tmp_path: Path, make_llm: Callable[..., AsyncLLM]
) -> None:
    """Without tokens for single bytes, no grammar of bytes can be held to."""
    source, folder = tmp_path / "source", tmp_path / "tokenizer"
    source.mkdir()
    folder.mkdir()
    train(source, model_type="unigram")
    convert(source, folder)
    shutil.copy(Path(fake_model) / "config.json", folder)
    llm = make_llm(tokenizer=str(folder))
    form = StructuredOutputsParams(regex="[a-z]{3}")
    with pytest.raises(SidestepError, match="tokenizer cannot be used for grammars: ") as caught:
        async for _ in llm.generate("Hello", SamplingParams(structured_outputs=form)):
            pass
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    async for out in llm.generate("Hello", SamplingParams(max_tokens=2, ignore_eos=True)):
        pass
    assert len(out.outputs[0].token_ids) == 2
