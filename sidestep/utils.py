"""Names of vLLM's module `utils` that scripts import."""

import argparse
import sys
import uuid
from collections.abc import Sequence
from typing import Any

from sidestep.frontend.vllm.vllm_flags import with_dashes


def random_uuid() -> str:
    """Return a new id for a request."""
    return uuid.uuid4().hex


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Argument parser that takes each flag with underscores too.

    For example, `--max_model_len` is `--max-model-len`.
    """

    def parse_known_args(  # type: ignore[override]  # as argparse has it
        self,
        args: Sequence[str] | None = None,
        namespace: Any = None,
    ) -> tuple[Any, list[str]]:
        """Parse the arguments as the base class does."""
        return super().parse_known_args(
            with_dashes(sys.argv[1:] if args is None else args), namespace
        )


__all__ = ["FlexibleArgumentParser", "random_uuid"]

# The finder in sidestep/__init__.py answers for names that this module lacks.
__path__: list[str] = []
