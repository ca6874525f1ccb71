"""Write the small models with which the readers of auto-round's files are tested.

    python -m scripts.write_auto_round_models FOLDER

auto-round is needed, which tests do not need; so its files are in tests/quantized/auto_round. It
rounds to the nearest code, without data. `plain` is the model in float16 that the others are made
from.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torch

EXPORTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "awq": ("W4A16", "auto_awq", {"group_size": 32, "sym": False}),
    "gptq": ("W4A16", "auto_gptq", {"group_size": 32}),
    "gptq-8-bits": ("W8A16", "auto_gptq", {"group_size": 32}),
    "auto-round": ("W4A16", "auto_round", {"group_size": 32, "sym": False}),
    "fp8-blocks": ("FP8_BLOCK", "fp8", {}),
    "w4a16": ("W4A16", "llm_compressor", {"group_size": 32}),
    "w8a8": ("INT8", "llm_compressor", {}),
    "mxfp4": ("MXFP4", "llm_compressor", {}),
}
"""By folder: the scheme, the format, and what else is given."""
VOCAB = 64


def write_plain(folder: Path) -> None:
    """Write the plain model, of one layer, and its tokenizer."""
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    torch.manual_seed(7)
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads, **none))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.25 if "proj" in name else 1.0)
    model.half().save_pretrained(folder)
    words = {f"w{index}": index for index in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def export(plain: Path, folder: Path, scheme: str, form: str, given: dict[str, Any]) -> None:
    """Write one of the quantized models: its config.json and its weights."""
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float16)
    tokenizer = AutoTokenizer.from_pretrained(plain)
    rounding: Any = AutoRound(
        model, tokenizer, scheme=scheme, iters=0, disable_opt_rtn=True, device_map="cpu", **given
    )
    made = folder.with_name(folder.name + "-made")
    rounding.quantize_and_save(str(made), format=form)
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (found,) = made.rglob(name)
        shutil.copy(found, folder / name)
    shutil.rmtree(made)


def main() -> None:
    """Write all models into the folder that the command names."""
    folder = Path(sys.argv[1])
    write_plain(folder / "plain")
    for name, (scheme, form, given) in EXPORTS.items():
        export(folder / "plain", folder / name, scheme, form, given)
    for file in (folder / "plain").iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            file.unlink()


if __name__ == "__main__":
    main()
