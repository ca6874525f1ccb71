"""The files of a model on another host than the one that has read the options."""

from __future__ import annotations

import os
from dataclasses import replace

import msgspec

from sidestep.ipc.config import EngineConfig
from sidestep.ipc.model.model_spec import TOKENIZER_FILES, resolve_model_path


def with_local_files(config: EngineConfig) -> EngineConfig:
    """Return a configuration whose paths exist on this host.

    Paths that the hosts share stay. Else the model is found by its name here too, and fetched if
    need be. Raises EngineStartError.
    """
    spec, tokenizer = config.spec, config.tokenizer_path
    if not os.path.exists(spec.path):
        path = resolve_model_path(config.model.model, config.model.revision)
        if tokenizer == spec.path:
            tokenizer = path
        spec = msgspec.structs.replace(spec, path=path)
    if tokenizer is not None and not os.path.exists(tokenizer):
        tokenizer = resolve_model_path(config.model.tokenizer or spec.path, files=TOKENIZER_FILES)
    return replace(config, spec=spec, tokenizer_path=tokenizer)
