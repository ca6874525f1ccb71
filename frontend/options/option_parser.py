"""The command-line parser, which reads options from flags, the environment and a YAML file.

ConfigArgParse does the work: a flag overrides the environment, and the environment overrides the
file. This module adds Python's names with underscores, errors of one line that name the source of a
wrong value, and suggestions.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import configargparse

from sidestep.frontend.vllm.vllm_flags import with_dashes
from sidestep.ipc.common.options import did_you_mean, not_a_choice
from sidestep.ipc.config import ENVIRONMENT_PREFIX, environment_options

SOURCES = "option_sources"
"""Attribute of a parsed command line with the sources of its options, for error messages.

It maps each option that no flag has set to the text of its source.
"""
_FROM_ENVIRONMENT = "from the environment variable"
_HINT = (
    "Each option is also a variable of the environment (--max-num-seqs: SIDESTEP_MAX_NUM_SEQS) "
    "and a key of the file that --config names (max_num_seqs: 8). A flag overrides the "
    "environment, which overrides the file."
)


# The library configargparse has no types.
class OptionParser(configargparse.ArgumentParser):  # type: ignore[misc]
    """A command's parser.

    takes_options: the command reads the environment and a file too; otherwise it has only
    subcommands.
    """

    def __init__(self, *, takes_options: bool = True, **options: Any) -> None:
        super().__init__(
            allow_abbrev=False,
            add_env_var_help=False,
            add_config_file_help=False,
            auto_env_var_prefix=ENVIRONMENT_PREFIX,
            config_file_parser_class=YamlFile(self._known_keys),
            **{"epilog": _HINT if takes_options else None, **options},
        )
        if takes_options:
            self.add_argument(
                "--config",
                metavar="FILE",
                is_config_file_arg=True,
                env_var=f"{ENVIRONMENT_PREFIX}CONFIG",
                help="YAML file with options, such as 'max_num_seqs: 8'",
            )

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: Any = None, **_options: Any
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse as the base class does, but exit with an error for an unknown option.

        The error is one of this command, which can suggest a known option.
        """
        words = with_dashes(sys.argv[1:] if args is None else args)
        parsed, unknown = super().parse_known_args(words, namespace, env_vars=environment_options())
        for word in unknown:
            flag = word.partition("=")[0]
            if flag.startswith("-"):
                self.error(
                    f"unknown option {flag}{did_you_mean(flag, self._option_string_actions)}"
                )
        if unknown:
            self.error(f"unexpected argument {unknown[0]!r}")
        setattr(parsed, SOURCES, {**getattr(parsed, SOURCES, {}), **self._sources()})
        return parsed, unknown

    def get_possible_config_keys(self, action: argparse.Action) -> list[str]:
        """Return the names of an option in a file.

        The first is the name that its environment variable has.
        """
        flag = next((flag for flag in action.option_strings if flag.startswith("--")), "")
        return [flag[2:].replace("-", "_"), flag[2:]] if flag else []

    def option_names(self) -> set[str]:
        """Return the names of all options of this command and of the commands in it."""
        names = set(self._known_keys())
        for command in self._commands():
            names |= command.option_names()
        return names

    def error(self, message: str) -> NoReturn:
        """Exit with one line about a wrong option.

        The line holds the problem, the source of the wrong value, and the command that lists the
        options.
        """
        named = re.match(r"argument ([^:\s]+): ", message)
        action = self._option_string_actions.get(named[1].split("/")[0]) if named else None
        source = self._sources().get(action.dest) if action else None
        where = f" ({source})" if source else ""
        print(
            f"{self.prog}: {message}{where}\n{self.prog} --help shows what there is",
            file=sys.stderr,
        )
        sys.exit(2)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, not_a_choice(value, action.choices))

    def _commands(self) -> Iterator[OptionParser]:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from action.choices.values()

    def _known_keys(self) -> list[str]:
        return [
            key
            for action in self._actions
            for key in self.get_possible_config_keys(action)
            if action.dest not in ("help", "config")
        ]

    def _sources(self) -> dict[str, str]:
        found = {}
        for source, settings in getattr(self, "_source_to_settings", {}).items():
            kind, _, file = source.partition("|")
            for name, (action, _value) in settings.items():
                if action is not None and kind in ("environment_variables", "config_file"):
                    found[action.dest] = f"from {file}" if file else f"{_FROM_ENVIRONMENT} {name}"
        return found


class YamlFile(configargparse.YAMLConfigFileParser):  # type: ignore[misc]
    """A parser of an options file, whose keys must be options of the command."""

    def __init__(self, known_keys: Callable[[], Collection[str]]) -> None:
        super().__init__()
        self._known_keys = known_keys

    def parse(self, stream: Any) -> Mapping[str, Any]:
        """Return the options as text and lists of text, with a mapping written as JSON."""
        import yaml

        try:
            read = yaml.safe_load(stream)
        except yaml.YAMLError as error:
            raise configargparse.ConfigFileParserException(
                f"{stream.name} is not YAML: {error}"
            ) from None
        if read is None:
            return {}
        if not isinstance(read, dict):
            raise configargparse.ConfigFileParserException(
                f"{stream.name} does not hold 'option: value' lines"
            )
        known = self._known_keys()
        for key in read:
            if key not in known:
                hint = did_you_mean(str(key), known)
                raise configargparse.ConfigFileParserException(
                    f"{stream.name}: unknown option {key!r}{hint}"
                )
        return {key: _as_text(value) for key, value in read.items() if value is not None}


def _as_text(value: Any) -> str | list[str]:
    if isinstance(value, list):
        return [str(item) for item in value]
    return json.dumps(value) if isinstance(value, dict) else str(value)


def check_variables(parser: OptionParser) -> None:
    """Exit with one line if the environment has an unknown option.

    An unknown option is a variable that begins like an option but is no option of any command.
    """
    known = [f"{ENVIRONMENT_PREFIX}{name}".upper() for name in parser.option_names()]
    for variable in environment_options():
        if variable not in known:
            parser.error(f"unknown environment variable {variable}{did_you_mean(variable, known)}")


def source_of(parsed: argparse.Namespace, name: str) -> str | None:
    """Return the source of an option's value; None if it was a flag."""
    sources: dict[str, str] = getattr(parsed, SOURCES, {})
    return sources.get(name)


def is_of_environment(parsed: argparse.Namespace, name: str) -> bool:
    """Return whether an option came from the environment alone.

    Commands share the environment, so an option that has no meaning for a command is no error
    there.
    """
    return (source_of(parsed, name) or "").startswith(_FROM_ENVIRONMENT)
