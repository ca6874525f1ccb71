"""The tokenizer of a GGUF file, as transformers rebuilds it from the vocabulary in the metadata."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from sidestep.ipc.model.gguf.header import read_header

_MODEL, _SPLITS = "tokenizer.ggml.model", "tokenizer.ggml.pre"
_MODELS = ("gpt2", "llama")
_LIKE_GPT2 = ("gpt-2", "olmo", "mpt", "jais", "phi-2")
"""Names of divisions into words that are GPT-2's, which is the default in transformers."""


class RefusedError(Exception):
    """A tokenizer that cannot be converted. The message goes on after the folder's name."""


def load_gguf(source: Path) -> Any:
    """Return the tokenizer of a file.

    Raises RefusedError for one that transformers would rebuild in another form.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    values = read_header(source).values
    known: dict[str, tuple[str, ...]] = {_MODEL: _MODELS}
    if values.get(_MODEL) == "gpt2":
        known[_SPLITS] = (*_LIKE_GPT2, *GGUF_PRE_TOKENIZER_SPLITS)
    for name, supported in known.items():
        if values.get(name) not in supported:
            raise RefusedError(
                f"has {name} {values.get(name)!r}, which is not supported; supported are "
                f"{', '.join(sorted(supported))}; give the folder of a tokenizer.json as the "
                "option tokenizer"
            )
    # Files beside it, of other tokenizers, are not read.
    with tempfile.TemporaryDirectory() as alone:
        (Path(alone) / source.name).symlink_to(source.absolute())
        return PreTrainedTokenizerFast.from_pretrained(alone, gguf_file=source.name)
