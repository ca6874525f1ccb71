"""Run every function of files of snippets: run_snippets.py URL SCRIPTED_URL FILE...

Print a line of JSON for each snippet: its file, its name, and its traceback if it has failed. The
script runs in any Python that has the snippets' libraries, without the engine.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Run the snippets, one after the other."""
    sys.path.insert(0, str(ROOT))
    url, scripted, *files = sys.argv[1:]
    os.environ.update(
        OPENAI_BASE_URL=url,
        OPENAI_API_BASE=url,
        OPENAI_API_KEY="none",
        LITELLM_LOCAL_MODEL_COST_MAP="True",
    )
    from tests.clients import addresses

    addresses.SCRIPTED = scripted
    with asyncio.Runner() as runner:  # clients keep connections, which belong to an event loop
        for file in files:
            for name, snippet in _snippets(file):
                print(
                    json.dumps({"file": file, "name": name, "error": _run(snippet, runner)}),
                    flush=True,
                )


def _snippets(file: str) -> list[tuple[str, Any]]:
    path = Path(__file__).with_name(file)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # pydantic looks for a model's names there
    spec.loader.exec_module(module)
    return [
        (name, item)
        for name, item in vars(module).items()
        if inspect.isfunction(item)
        and item.__module__ == module.__name__
        and not inspect.signature(item).parameters
    ]


def _run(snippet: Any, runner: asyncio.Runner) -> str | None:
    try:
        if inspect.iscoroutinefunction(snippet):
            runner.run(snippet())
        else:
            snippet()
    except Exception:
        return traceback.format_exc()
    return None


if __name__ == "__main__":
    main()
