"""Long texts: other threads run while one is tokenised, and its memory is given back."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from sidestep.frontend.input.lane import Lane
from sidestep.frontend.input.tokenizer import Tokenizer
from tests.processes import run

TEXT = "def get_name(self, value):\n    return self.values[value] + 12345\n"


def turns_during(work: Callable[[], object]) -> int:
    """Return how often another thread ran until the work was done."""
    turns, done = 0, threading.Event()

    def take_turns() -> None:
        nonlocal turns
        while not done.wait(0.001):
            turns += 1

    thread = threading.Thread(target=take_turns)
    thread.start()
    try:
        work()
    finally:
        done.set()
        thread.join()
    return turns


def test_other_threads_run_while_a_long_text_is_tokenised(tokenizer: Tokenizer) -> None:
    text = TEXT * 3000
    # If the interpreter lock were held, the other thread would run only at the beginning.
    assert turns_during(lambda: tokenizer.encode(text)) > 20


def test_other_threads_run_while_many_tokens_become_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT) * 20_000
    assert turns_during(lambda: tokenizer.decode(ids)) > 10


def test_long_texts_are_tokenised_as_short_ones_are(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(TEXT * 100) == tokenizer.fast.encode(TEXT * 100).ids
    assert tokenizer.decode(tokenizer.encode(TEXT * 100)) == TEXT * 100


MEASURE = """
import threading
from pathlib import Path
from sidestep import DEFAULT_MODEL
from sidestep.frontend.input.prompt_limit import PromptLimit
from sidestep.frontend.input.tokenizer import Tokenizer

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

def watch():
    while not done.wait(0.001):
        peak[0] = max(peak[0], resident_bytes())

tokenizer = Tokenizer(DEFAULT_MODEL)
before, peak, done = resident_bytes(), [0], threading.Event()
watcher = threading.Thread(target=watch)
watcher.start()
assert tokenizer.encode(TEXT * 20_000, limit=PromptLimit(10**9))
done.set()
watcher.join()
print(peak[0] - before, resident_bytes() - before)
"""
"""Prints the bytes that a process takes for a long text at most, and those that it keeps.

The process is a new one: an older one has free memory of its own, which the text may fit into.
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not tell")
def test_the_memory_of_a_long_text_is_given_back() -> None:
    done = run(sys.executable, "-c", f"TEXT = {TEXT!r}\n{MEASURE}")
    assert done.returncode == 0, done.stderr
    peak, kept = map(int, done.stdout.split())
    assert peak > 80e6, "the text was not long enough to tell"
    assert kept < peak / 3


async def test_the_smallest_waiting_job_is_next() -> None:
    lane, order, go_on = Lane(), list[int](), threading.Event()

    def work(size: int) -> int:
        assert go_on.wait(30)
        order.append(size)
        return size

    tasks = [asyncio.create_task(lane.run(size, work, size)) for size in (50, 30, 40, 10, 20)]
    await asyncio.sleep(0)
    tasks[3].cancel()  # its caller no longer waits
    go_on.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [r for r in results if isinstance(r, int)] == [50, 30, 40, 20] and order == [
        50,
        20,
        30,
        40,
    ]


async def test_a_job_that_has_begun_keeps_the_lane() -> None:
    lane, begun, go_on = Lane(), threading.Event(), threading.Event()

    def fail() -> None:
        begun.set()
        assert go_on.wait(30)
        raise ValueError("told to nobody")

    left = asyncio.create_task(lane.run(1, fail))
    while not begun.is_set():
        await asyncio.sleep(0)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    following = asyncio.create_task(lane.run(1, lambda: "ran"))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not following.done()
    go_on.set()
    assert await following == "ran"
