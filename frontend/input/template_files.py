"""The chat templates that a model's folder holds, as texts.

This is apart from chat_template.py, which imports jinja2: the frontend does so while the engine
starts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sidestep.ipc.common.errors import EngineStartError

Message = Mapping[str, Any]
"""A chat message: role, content, and further fields that the template reads."""

DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of a model's templates.

Conversations with tools use the second if the model has it.
"""
_FOLDER = "additional_chat_templates"


def chat_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Return the sources of a model's chat templates by their names, as transformers finds them.

    Files of templates (chat_template.jinja, additional_chat_templates/NAME.jinja) replace those of
    tokenizer_config.json: one text, or a list of objects with `name` and `template`. Without
    either, the template of chat_template.json is taken, where models with a processor keep it.
    """
    default = folder / "chat_template.jinja"
    files = {DEFAULT: default} if default.exists() else {}
    files |= {file.stem: file for file in sorted((folder / _FOLDER).glob("*.jinja"))}
    if files:
        return {name: _read(file) for name, file in files.items()}
    given = tokenizer_config.get("chat_template")
    if given is not None:
        return _named(given, folder / "tokenizer_config.json")
    return _of_processor(folder / "chat_template.json")


def _of_processor(file: Path) -> dict[str, str]:
    """Return the templates of a chat_template.json, by their names; none if there is no file."""
    if not file.exists():
        return {}
    try:
        value = json.loads(_read(file))
    except ValueError as error:
        raise EngineStartError(f"tokenizer: {file} is not valid JSON ({error})") from None
    return _named(value.get("chat_template") if isinstance(value, dict) else None, file)


def _named(given: Any, file: Path) -> dict[str, str]:
    """Return the templates in a field of a file, by their names. Raises EngineStartError."""
    if isinstance(given, str):
        return {DEFAULT: given}
    named = given if isinstance(given, list) else [None]
    for one in named:
        if (
            not isinstance(one, dict)
            or not isinstance(one.get("name"), str)
            or not isinstance(one.get("template"), str)
        ):
            raise EngineStartError(
                f"tokenizer: chat_template in {file} must be text, or a list of "
                "objects with name and template"
            )
    return {one["name"]: one["template"] for one in given}


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EngineStartError(f"tokenizer: {file} cannot be read: {error}") from None
