"""Function of vLLM's module `logger` that scripts import."""

import logging


def init_logger(name: str) -> logging.Logger:
    """Return the logger of a module: Python's own."""
    return logging.getLogger(name)


__all__ = ["init_logger"]

# The finder in sidestep/__init__.py answers for names that this module lacks.
__path__: list[str] = []
