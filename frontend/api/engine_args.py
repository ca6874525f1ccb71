"""EngineArgs as applications import it: with flags for programs that parse a command line."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Self, TypeVar

from sidestep.frontend.options.flags import add_engine_flags, engine_options
from sidestep.ipc import config

Parser = TypeVar("Parser", bound=argparse.ArgumentParser)


class EngineArgs(config.EngineArgs):
    """Every option of the engine as one flat set of keyword arguments.

    Each option can be a flag of a program's parser. vLLM's names of options are accepted too.
    Raises ValidationError, which names the option.
    """

    def __eq__(self, other: object) -> bool:
        """Compare the options, whichever of the two classes holds them."""
        return isinstance(other, config.EngineArgs) and all(
            getattr(self, f.name) == getattr(other, f.name) for f in fields(self)
        )

    __hash__ = config.EngineArgs.__hash__

    @staticmethod
    def add_cli_args(parser: Parser) -> Parser:
        """Add a flag for each option to a parser, and return the parser.

        A flag that is not given sets no attribute, so `LLM(**vars(parser.parse_args()))` has the
        defaults of LLM.
        """
        add_engine_flags(parser, positional_model=False)
        return parser

    @classmethod
    def from_cli_args(cls, parsed: argparse.Namespace) -> Self:
        """Return the options of a parser with these flags.

        The parser may have other flags too. Raises ValidationError.
        """
        return cls(**engine_options(parsed))
