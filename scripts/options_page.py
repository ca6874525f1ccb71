"""Write docs/options.md from the fields that declare the options.

python -m scripts.options_page
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from sidestep.frontend.options.engine_args import EngineArgs
from sidestep.frontend.options.eval_options import EvalArgs
from sidestep.frontend.options.node_options import NodeOptions
from sidestep.frontend.options.option_flags import flag_names
from sidestep.frontend.options.serve_options import ServerArgs
from sidestep.ipc.common.options import Options
from sidestep.ipc.config_sections import DEFAULT_MODEL

PAGE = Path(__file__).resolve().parents[1] / "docs" / "options.md"
INTRODUCTION = """# Options

<!-- Written by `python -m scripts.options_page` from the options' fields; a test compares. -->

Each option of the engine, the server and `sidestep eval` has one name. It is a flag of the
commands (`--max-num-seqs 8`), a variable of the environment (`SIDESTEP_MAX_NUM_SEQS=8`), a key of a
YAML file (`max_num_seqs: 8`) and, for the engine, an argument in Python
(`EngineArgs(max_num_seqs=8)`, `LLM(max_num_seqs=8)`). A flag overrides the environment, the
environment overrides the file, and the file overrides the default. Python reads neither the
environment nor a file.

```
SIDESTEP_MAX_NUM_SEQS=8 sidestep generate --max-model-len 1k 'def get_name('
sidestep generate --config examples/engine.yaml 'def get_name('
sidestep serve --config examples/engine.yaml --access-log
```

[examples/engine.yaml](../examples/engine.yaml) is such a file. `SIDESTEP_CONFIG` names one for
every command.

- An unknown flag, key, variable or value is an error that names it, and says which known one is
  alike.
- Lists have commas between their values, in a flag or a variable, or are lists in YAML and Python.
  Switches are `--enforce-eager` and `--no-enforce-eager` as flags, `true` and `false` elsewhere,
  `True` and `False` in Python.
- Lengths may be written as `32k` (times 1024), sizes as `512M` or `4G` (powers of 1024), in Python
  too.
- An empty variable and a key that is `null` set nothing. The environment is shared by all commands,
  so a command ignores the variables of options that it does not have. A file must hold options of
  the command alone.
- Variables that Kubernetes makes for services whose names begin with `sidestep` are not options,
  `SIDESTEP_PORT` with a `tcp://` address among them.
- `SIDESTEP_API_KEYS` and `SIDESTEP_OPERATOR_KEYS` hold the keys that a server takes, with commas
  between them. `SIDESTEP_API_KEY` is the key that `chat`, `generate` and `bench serve` show to the
  server of `--url`.
- `--json` prints the result of `bench`, `eval` and `topology` as JSON on standard output, instead
  of a table. Progress, headings and log lines go to standard error.

`sidestep COMMAND --help` lists the options of a command, those of sampling and of loads among them.
[sampling.md](sampling.md) describes sampling parameters.
"""


def page() -> str:
    """Return the whole page."""
    return "".join(_parts())


def _parts() -> Iterator[str]:
    yield INTRODUCTION
    sections = [cls for cls in reversed(EngineArgs.__mro__) if issubclass(cls, Options)]
    for cls in sections:
        if cls not in (Options, EngineArgs):
            yield from _section(cls)
    yield from _section(ServerArgs)
    yield from _section(EvalArgs)
    yield from _section(NodeOptions)


def _section(cls: type[Any]) -> Iterator[str]:
    title = cls.__name__.removesuffix("Config").removesuffix("Args")
    yield f"\n## {title}\n\n{(cls.__doc__ or '').splitlines()[0]}\n\n"
    yield "| option | default | |\n|---|---|---|\n"
    for field in fields(cls):
        names = ", ".join(f"`{flag}`" for flag in flag_names(field.name))
        text = field.metadata["doc"]
        if choices := field.metadata["choices"]:
            text += f" One of {', '.join(f'`{choice}`' for choice in choices)}."
        yield f"| {names} | {_default(field.default)} | {_escaped(text)} |\n"


def _default(value: Any) -> str:
    if value == DEFAULT_MODEL:
        return "the bundled model"
    return "" if value is None else f"`{value}`"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(page())
