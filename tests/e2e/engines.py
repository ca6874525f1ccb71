"""Engines on the CPU that tests share: most of a small engine's life is its start."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from sidestep import DEFAULT_MODEL, LLM

MOST_RUNNING = 3
"""Number of engines that are kept; each has a core and one worker or more."""


class Engines:
    """A cache of engines: one for each model and set of options that a test asks for.

    It keeps the most recent ones. Tests get an engine with an empty prefix cache. Its counters go
    on from the tests before.
    """

    def __init__(self) -> None:
        self._running: OrderedDict[str, LLM] = OrderedDict()

    def get(self, path: str = DEFAULT_MODEL, **options: Any) -> LLM:
        """Return an engine in float32 with one thread, unless the options say otherwise.

        The caller must not shut it down.
        """
        options = {"device": "cpu", "dtype": "float32", "cpu_threads": 1, **options}
        key = repr((path, sorted(options.items())))
        llm = self._running.pop(key, None)
        if llm is None:
            while len(self._running) >= MOST_RUNNING:
                self._running.popitem(last=False)[1].shutdown()
            llm = LLM(path, **options)
        self._running[key] = llm
        assert llm.reset_prefix_cache(), "a test has left requests behind"
        return llm

    def close(self) -> None:
        """Shut down all engines."""
        for llm in self._running.values():
            llm.shutdown()
