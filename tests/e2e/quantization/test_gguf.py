"""Models in GGUF files give the tokens of the plain models that have the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sidestep import SamplingParams
from tests.e2e.engines import Engines
from tests.e2e.models import load_reference, random_prompts, reference_tokens, write_model
from tests.gguf_files import library, write_gguf

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
LARGE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "num_hidden_layers": 2,
}


def mixed(name: str) -> str:
    """Return the types of Q4_K_M, with an embedding of another one."""
    if name == "token_embd.weight":
        return "Q5_1"
    if name == "output.weight" or "attn_v" in name or "ffn_down" in name:
        return "Q6_K"
    return "Q4_K"


@pytest.mark.parametrize(("split", "ranks"), [(0, 1), (7, 2)])
def test_a_file_of_several_types_gives_the_tokens_of_its_weights(
    split: int, ranks: int, tmp_path: Path, engines: Engines
) -> None:
    library()
    folder = tmp_path / "plain"
    write_model("llama-gqa", folder, **LARGE)
    file = tmp_path / "files" / "model.gguf"
    file.parent.mkdir()
    write_gguf(folder, file, mixed, rounded=tmp_path / "rounded", split=split)
    assert len(list(file.parent.iterdir())) == (3 if split else 1)
    prompts = random_prompts(4, 331)
    llm = engines.get(str(file.parent), skip_tokenizer_init=True, tensor_parallel_size=ranks)
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], GREEDY, use_tqdm=False
    )
    reference = load_reference(str(tmp_path / "rounded"))
    expected = reference_tokens(reference, prompts, [10] * 4)
    assert [out.outputs[0].token_ids for out in outputs] == expected
