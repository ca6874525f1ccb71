"""Parts of the fake device: groups with a window, profiles in the form of torch's, and vectors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np

from sidestep.executor.runner.profile_files import make_folder, profile_file
from sidestep.executor.runner.runner import WorkerArgs
from sidestep.executor.runner.worker_calls import CallRefusedError
from sidestep.ipc.model.pooling_spec import PoolingSpec
from sidestep.ipc.transport.step import Float32, Int32, StepInput
from sidestep.ipc.transport.worker_calls import CallResult, StartProfile, StopProfile

HASH_BITS = (1 << 61) - 1
"""The bits that a hash keeps."""


def chain(previous: int, token: int) -> int:
    """Return the hash of a context that ends with `token`.

    previous: the hash of the context before that token.
    """
    return (previous * 1_000_003 + token * 8_191 + 12_345) & HASH_BITS


class FakeWindow:
    """A cache group with a window. Each token must find what its window reaches."""

    def __init__(self, window: int, slots: int) -> None:
        self._window = window
        self.blocks: list[dict[int, int]] = [{} for _ in range(slots)]
        """By slot, the block of each index."""

    def check(self, cache: list[list[int]], slot: int, position: int, tokens: list[int]) -> None:
        """Raise AssertionError if the token at a position does not find the tokens before it.

        cache: the hashes in each block. tokens: those of the slot, -1 where they are not known.
        """
        blocks, size = self.blocks[slot], len(cache[0])
        reached = range(max(0, position - self._window + 1), position + 1)
        states = [cache[blocks[at // size]][at % size] for at in reached]
        for at, (before, state) in zip(reached[1:], pairwise(states), strict=True):
            if tokens[at] >= 0:
                assert state == chain(before, tokens[at]), "a block of the window is another's"


class FakeStates:
    """States of recurrent layers: each has the hash of the tokens that it has taken in."""

    def __init__(self) -> None:
        self._states: dict[int, list[int]] = {}
        """By state, the hash at the row's last token that is no draft, and at each draft."""

    def copy(self, sources: Int32, targets: Int32) -> None:
        """Copy the states that a step names."""
        pairs = zip(sources.tolist(), targets.tolist(), strict=True)
        self._states |= {target: self._states[source] for source, target in pairs}

    def compute(
        self,
        step: StepInput,
        slot: int,
        own: int,
        before: int,
        states: Sequence[int],
        num_drafts: int,
    ) -> None:
        """Take a row's tokens in.

        Raises AssertionError if the state is not that of the tokens before. before, states: hashes
        of the context before the row, and at each of its tokens. num_drafts: drafts among them.
        """
        assert before == 0 or before in self._states[own], "the state of other tokens"
        self._states[own] = list(states[-1 - num_drafts :])
        for saved, count, target in zip(
            step.saved_slots.tolist(),
            step.saved_counts.tolist(),
            step.saved_states.tolist(),
            strict=True,
        ):
            if saved == slot:
                self._states[target] = [states[count - 1]]


class FakeProfile:
    """Answers the calls that record the times of steps."""

    def __init__(self, args: WorkerArgs) -> None:
        """Begin without a profile."""
        self._args = args
        self._folder: str | None = None
        """Where the profile goes that is being recorded."""
        self._events: list[dict[str, object]] = []

    def start_profile(self, call: StartProfile) -> CallResult:
        """Begin to record."""
        if self._folder is not None:
            raise CallRefusedError("a profile is being recorded already; stop it first")
        make_folder(call.folder)
        self._folder, self._events = call.folder, []
        return {}

    def note(self, step: StepInput, start_s: float, end_s: float) -> None:
        """Record a step. start_s, end_s: on the monotonic clock."""
        if self._folder is not None:
            self._events.append(
                {
                    "ph": "X",
                    "name": f"step {step.step_id}",
                    "pid": self._args.replica,
                    "tid": self._args.rank,
                    "ts": start_s * 1e6,
                    "dur": (end_s - start_s) * 1e6,
                    "args": {"rows": len(step.slots), "tokens": int(step.num_tokens.sum())},
                }
            )

    def stop_profile(self, call: StopProfile) -> CallResult:
        """End the recording and write it."""
        if self._folder is None:
            raise CallRefusedError("no profile is being recorded")
        file, self._folder = profile_file(self._folder, self._args), None
        try:
            with open(file, "wb") as out:
                out.write(msgspec.json.encode({"traceEvents": self._events}))
        except OSError as error:
            raise CallRefusedError(f"{file} cannot be written: {error.strerror}") from None
        return {"file": file}


def fake_state(context: int, width: int) -> Float32:
    """Return what stands for a token's state, [width]. context: hash of the tokens up to it."""
    return np.random.default_rng(context).standard_normal(width, np.float32)


class FakePooler:
    """Pools the states of each slot's tokens, as executor/pooling/pooler.py does."""

    def __init__(self, spec: PoolingSpec) -> None:
        """Begin without requests."""
        self._spec = spec
        self._pooled: dict[int, Float32] = {}

    def __repr__(self) -> str:
        return f"FakePooler({self._spec.pooling!r})"

    def add(self, slot: int, first: int, contexts: Sequence[int]) -> None:
        """Take in tokens of a slot, from position `first` on: the hash of each one's context."""
        kind, width = self._spec.pooling, self._spec.width
        if kind == "last":
            self._pooled[slot] = fake_state(contexts[-1], width)
            return
        if first == 0:
            self._pooled[slot] = np.zeros(width, np.float32)
        for position, context in enumerate(contexts, first):
            if kind == "mean" or position == 0:
                self._pooled[slot] = self._pooled[slot] + fake_state(context, width)

    def vector(self, slot: int, num_tokens: int) -> Float32:
        """Return the vector of a slot whose prompt has this many tokens, all of them taken in."""
        pooled = self._pooled.pop(slot)
        return pooled / np.float32(num_tokens) if self._spec.pooling == "mean" else pooled
