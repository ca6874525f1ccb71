"""Engines on the CPU that tests share: most of a small engine's life is its start."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from sidestep import DEFAULT_MODEL, LLM

MOST_RUNNING = 3
"""Engines that are kept; each has a core and one worker or more."""


class Engines:
    """Starts an engine for each model and set of options that a test asks for, and keeps the
    latest.

    Tests get an engine with an empty prefix cache. Its counters go on from the tests before.
    """

    def __init__(self) -> None:
        self._running: OrderedDict[str, LLM] = OrderedDict()

    def get(self, path: str = DEFAULT_MODEL, **options: Any) -> LLM:
        """Return an engine in float32 with one thread, unless the options say otherwise. Do not
        shut it down.
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
        """End them all."""
        for llm in self._running.values():
            llm.shutdown()
