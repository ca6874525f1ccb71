"""Write the tables of docs/migrate-from-vllm.md from those that the code uses.

python -m scripts.vllm_tables
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path

from sidestep.frontend.options.engine_args import EngineArgs
from sidestep.frontend.options.serve_options import ServerArgs
from sidestep.ipc.vllm.calls import ARGUMENTS, METHODS, PROMPT_KEYS
from sidestep.ipc.vllm.foreign import Foreign
from sidestep.ipc.vllm.imports import MODULES, NAMES
from sidestep.ipc.vllm.options import ENGINE_OPTIONS, SERVER_OPTIONS, VALUES
from sidestep.ipc.vllm.params import POOLING_FIELDS, SAMPLING_FIELDS, STRUCTURE_FIELDS
from sidestep.ipc.vllm.speculation import SPECULATIVE_KEYS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "migrate-from-vllm.md"
BEGIN = "<!-- Written by `python -m scripts.vllm_tables`; a test compares. -->\n"
OURS_ALONE = {
    "dummy_seed",
    "num_kv_blocks",
    "target_itl_ms",
    "pipeline_layers",
    "cpu_threads",
    "fake_step_ms",
    "fake_faults",
    "profiler_dir",
    "max_num_queued_reqs",
    "max_num_queued_tokens",
    "routing",
    "public_prefixes",
    "api_key_file",
    "max_body_bytes",
    "read_timeout",
    "access_log",
}
"""Options that vLLM does not have, or not by this name."""


def tables() -> str:
    """Return the part of the page that follows from the code."""
    return "".join(_parts())


def _parts() -> Iterator[str]:
    yield "### The same name and meaning\n\n"
    for cls, title in ((EngineArgs, "Engine"), (ServerArgs, "Server")):
        shared = [f.name for f in fields(cls) if f.name not in OURS_ALONE]
        line = f"{title}: {', '.join(f'`{name}`' for name in shared)}."
        yield textwrap.fill(line, 100, break_long_words=False, break_on_hyphens=False) + "\n\n"
    yield "### vLLM's words for values\n\n| option | vLLM's value | value here |\n|---|---|---|\n"
    for name, words in VALUES.items():
        yield "".join(f"| `{name}` | `{theirs}` | `{ours}` |\n" for theirs, ours in words.items())
    for title, table in (
        ("Engine options", ENGINE_OPTIONS),
        ("Keys of speculative_config", SPECULATIVE_KEYS),
        ("Server options", SERVER_OPTIONS),
        ("SamplingParams", SAMPLING_FIELDS),
        ("StructuredOutputsParams", STRUCTURE_FIELDS),
        ("PoolingParams", POOLING_FIELDS),
        ("Keys of prompts", PROMPT_KEYS),
        ("Arguments of calls", ARGUMENTS),
    ):
        yield f"\n### {title}\n\n| name (values that are taken) | what there is here |\n|---|---|\n"
        yield from _rows(
            {
                name: (_with_values(name, foreign), foreign.instead)
                for name, foreign in table.items()
            }
        )
    for title, names in (
        ("Methods and attributes", METHODS),
        ("Imported names", NAMES),
        ("Modules", MODULES),
    ):
        yield f"\n### {title}\n\n| name | what there is here |\n|---|---|\n"
        yield from _rows({name: (f"`{name}`", text) for name, text in names.items()})


def _with_values(name: str, foreign: Foreign) -> str:
    values = ", ".join(f"`{value!r}`" for value in foreign.accepted)
    return (
        f"`{name}` (all)" if foreign.same_as else f"`{name}` ({values})" if values else f"`{name}`"
    )


def _rows(table: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    """Yield one row for all names with the same sentence."""
    rows: dict[str, list[str]] = {}
    for cell, text in table.values():
        rows.setdefault(text, []).append(cell)
    for text, cells in rows.items():
        yield f"| {', '.join(cells)} | {text} |\n"


def main() -> None:
    """Write the page."""
    written, begin, _ = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    assert begin, f"{PAGE} has lost the line {BEGIN!r}"
    PAGE.write_text(f"{written}{BEGIN}\n{tables()}", encoding="utf-8")


if __name__ == "__main__":
    main()
