"""A device without a model: scripted tokens, scripted step times, no torch.

It is for tests, and to stress the overlap of steps.

The script depends on the whole context as read through the block table: each position of the fake
KV cache holds a hash of all tokens up to it, made from the hash at the position before. So a
scheduler that hands out a wrong block, or one that is still in use, changes the tokens, as it would
with a real model; the batch, the chunking and the timing do not.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np

from sidestep.executor.base import WorkerReady
from sidestep.executor.runner.fake_parts import (
    HASH_BITS,
    FakePooler,
    FakeProfile,
    FakeStates,
    FakeWindow,
    chain,
)
from sidestep.executor.runner.runner import DoneOutput, PendingOutput, WorkerArgs
from sidestep.executor.runner.step_order import StepOrder
from sidestep.executor.runner.worker_calls import CallRefusedError
from sidestep.executor.speculation.proposer import drafts_of_forced, make_proposer
from sidestep.ipc.params.logits_controls import Controls, decode_controls
from sidestep.ipc.transport.slot_columns import empty_tables
from sidestep.ipc.transport.step import (
    Int32,
    Int64,
    LogprobColumns,
    StepInput,
    StepMasks,
    StepOutput,
    UInt8,
)
from sidestep.ipc.transport.worker_calls import (
    CallResult,
    MemoryUse,
    PrepareWeights,
    Sleep,
    WakeUp,
)

_NO_IDS = np.empty(0, np.int32)
DEFAULT_BLOCKS = 8192
DEFAULT_BLOCK_SIZE = 16
"""Tokens in a KV block."""


def next_token(context_hash: int, seed: int, vocab_size: int) -> int:
    """Return the token that follows a context."""
    return ((context_hash ^ (seed * 0x9E3779B97F4A7C15)) & HASH_BITS) % 1_000_000_007 % vocab_size


def candidates(context_hash: int, count: int, vocab_size: int) -> list[tuple[float, int]]:
    """Return the best tokens to follow a context, for a search.

    Each entry has a number that stands for the token's logprob, and the token.
    """
    rated = (
        (-(chain(context_hash, token) % 1_000_003) / 100_000, token) for token in range(vocab_size)
    )
    return sorted(rated, reverse=True)[:count]


def expected_tokens(prompt: Sequence[int], count: int, seed: int, vocab_size: int) -> list[int]:
    """Return the tokens that a request must give, whatever ran beside it."""
    state, tokens = 0, []
    for token in prompt:
        state = chain(state, token)
    for _ in range(count):
        tokens.append(next_token(state, seed, vocab_size))
        state = chain(state, tokens[-1])
    return tokens


class FakeMasks:
    """The table of masks, each as the tokens that it allows."""

    def __init__(self, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // 32)
        self._table: dict[int, Int64] = {}
        self.forced: dict[int, Int32] = {}
        """By slot, the tokens that a grammar alone decides."""

    def take(self, step: StepInput, masks: StepMasks) -> dict[int, list[Int64]]:
        """Store new masks, and return them for each slot that has some.

        A mask is the tokens that may be sampled. A slot's first mask is for its token, the others
        are for the tokens behind its drafts.
        """
        assert masks.step_id == step.step_id, (
            f"masks of step {masks.step_id} came for step {step.step_id}"
        )
        for index, words in enumerate(masks.words.reshape(-1, self._num_words), masks.first_new):
            self._table[index] = np.flatnonzero(
                np.unpackbits(words.view(np.uint8), bitorder="little")
            )
        forced = masks.forced_by_row()
        self.forced = {int(step.slots[row]): tokens.copy() for row, tokens in forced.items()}
        indices = iter(masks.mask_indices.tolist())
        sizes = masks.sizes.tolist() or [1] * len(masks.rows)
        return {
            slot: [self._table[index] for index in islice(indices, size)]
            for slot, size in zip(step.slots[masks.rows].tolist(), sizes, strict=True)
        }


class FakeDevice:
    """A device with one stream for each stage of a pipeline.

    A step begins in a stage when it is launched, the stage has done the step before, and the stage
    before has done this step. It takes `step_s` seconds in each stage. The first stage also waits
    for the tokens that the step may need, as ipc.transport.step says.
    """

    def __init__(self, step_s: float, num_stages: int = 1) -> None:
        self._step_s = step_s
        self._free_at = [0.0] * num_stages
        self._ends: deque[tuple[int, float]] = deque()
        """Beats of steps, and when their tokens were there, as long as steps may have to wait for
        them."""

    def launch(self, beat: int) -> tuple[float, float]:
        """Return start and end, in the last stage, of a step launched now.

        Both are seconds of time.monotonic().
        """
        start = end = time.monotonic()
        while self._ends and self._ends[0][0] <= beat - len(self._free_at):
            end = max(end, self._ends.popleft()[1])
        for stage, free_at in enumerate(self._free_at):
            start = max(end, free_at)
            end = self._free_at[stage] = start + self._step_s
        self._ends.append((beat, end))
        return start, end

    def sample_late(self) -> float:
        """Return the end of the last step, whose masks have come now.

        It is now, or when the step's layers are done, whichever is later.
        """
        beat, end = self._ends.pop()
        end = self._free_at[-1] = max(time.monotonic(), end)
        self._ends.append((beat, end))
        return end


class TimedOutput(PendingOutput):
    """An output that is ready when the device's clock says so."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    @property
    def ready(self) -> bool:
        """Whether the step's end has passed."""
        return time.monotonic_ns() >= self._output.end_ns

    def wait(self) -> StepOutput:
        """Sleep until the step's end, and return its output."""
        while (left := self._output.end_ns - time.monotonic_ns()) > 0:
            time.sleep(left / 1e9)
        return self._output


class _Sampled(NamedTuple):
    """A row that has sampled."""

    slot: int
    tokens: list[int]
    states: list[int]
    """Hash of the context of each token."""
    num_drafts: int
    """Drafts that it has verified."""
    guess: int | None
    """The first draft that it has not verified, if all before it were accepted."""


class _Computed(NamedTuple):
    """A row that samples."""

    slot: int
    states: list[int]
    """Hash of the context at its last token, and at each of its drafts."""


@dataclass(slots=True)
class _FakeStep:
    """A step on its way through the runner."""

    step: StepInput
    start: float = 0.0
    end: float = 0.0
    """Times of the last stage, in seconds of time.monotonic()."""
    computed: Sequence[_Computed] = ()
    allowed: dict[int, list[Int64]] = field(default_factory=dict)
    """By slot, the tokens that each of a row's masks allows."""
    sampled: list[_Sampled] = field(default_factory=list)


class FakeRunner(StepOrder[_FakeStep]):
    """Keeps the same rows per slot as the real runner."""

    def __init__(self, args: WorkerArgs) -> None:
        super().__init__(args)
        self._vocab_size = args.spec.vocab_size
        self._block_size = args.cache.block_size or DEFAULT_BLOCK_SIZE
        self._num_blocks = args.cache.num_kv_blocks or DEFAULT_BLOCKS
        self._num_stages = args.parallel.pipeline_parallel_size
        self._device = FakeDevice(args.parallel.fake_step_ms / 1e3, self._num_stages)
        self._instant = args.parallel.fake_step_ms == 0
        slots = args.scheduler.limits("fake", self._num_stages).num_slots
        self._cache, self._is_asleep = self._empty_cache(), False
        self._tokens: list[list[int]] = [[] for _ in range(slots)]
        """Known and sampled tokens; -1 for tokens that are in the cache and were not sent."""
        self._records = empty_tables(slots)
        self._blocks: list[list[int]] = [[] for _ in range(slots)]
        groups = args.cache_groups
        self._has_full = groups.has_full
        self._windows = [FakeWindow(window, slots) for window in groups.windows]
        self._states = FakeStates()
        self._num_computed = [0] * slots
        self._known_from = [0] * slots
        """The beat from which on the first stage of a pipeline would know the last token."""
        self._controls = [Controls()] * slots
        self._masks = FakeMasks(self._vocab_size)
        self._drafts: list[list[int]] = [[] for _ in range(slots)]
        self._proposer = make_proposer(
            args.scheduler.speculation, self._vocab_size, self._next_tokens
        )
        self._profile = FakeProfile(args)
        pooling = args.spec.pooling
        self._pooler = None if pooling is None else FakePooler(pooling)
        self.samples = pooling is None
        self.calls = (self, self._profile)
        self.ready = WorkerReady(
            num_kv_blocks=self._num_blocks,
            block_size=self._block_size,
            device_type="fake",
            device="fake",
        )

    def _enter(self, step: StepInput) -> _FakeStep:
        self._take_requests(step)
        for slot, token in zip(
            step.forced_slots.tolist(), step.forced_tokens.tolist(), strict=True
        ):
            self._tokens[slot][self._num_computed[slot]] = token
            self._known_from[slot] = step.beat
        return _FakeStep(step)

    def _copy_blocks(self, sources: Int32, targets: Int32) -> None:
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self._cache[target] = self._cache[source].copy()

    def _copy_states(self, sources: Int32, targets: Int32) -> None:
        self._states.copy(sources, targets)

    def _receive(self, work: _FakeStep) -> None:
        """Wait, on the device's clock, for what the first stage needs of the last one."""
        work.start, work.end = self._device.launch(work.step.beat)

    def _compute(self, work: _FakeStep) -> None:
        """Compute all rows at once; all of them sample later."""
        step, slots = work.step, work.step.slots.tolist()
        block_ids, used = step.block_ids.tolist(), 0
        for slot, new_blocks in zip(slots, step.num_new_blocks.tolist(), strict=True):
            self._blocks[slot] += block_ids[used : used + new_blocks]
            used += new_blocks
        for window, slot, index, block in zip(
            (step.placed_groups - 1).tolist(),
            step.placed_slots.tolist(),
            step.placed_indices.tolist(),
            step.placed_blocks.tolist(),
            strict=True,
        ):
            self._windows[window].blocks[slot][index] = block
        # A row may read a block that another row of the same step writes. A model computes all rows
        # layer by layer. Here the row that begins at the lower position goes first, since the other
        # begins after what it writes.
        rows = sorted(
            zip(slots, step.num_tokens.tolist(), strict=True),
            key=lambda row: self._num_computed[row[0]],
        )
        found = {slot: self._compute_row(step, slot, count) for slot, count in rows}
        work.computed = [row for slot in slots if (row := found[slot]) is not None]

    def _take_masks(self, work: _FakeStep, masks: StepMasks) -> None:
        work.allowed = self._masks.take(work.step, masks)
        work.end = self._device.sample_late()

    def _sample_rest(self, work: _FakeStep) -> None:
        work.sampled = [
            self._sample_row(work.step, row, work.allowed.get(row.slot)) for row in work.computed
        ]

    def _end(self, work: _FakeStep) -> PendingOutput:
        """Return an output that is ready when the fake device would have ended the step."""
        self._profile.note(work.step, work.start, work.end)
        output = self._output(work.step, work.sampled)
        if self._pooler is not None and work.computed:
            output.vectors = np.concatenate(
                [self._pooler.vector(r.slot, self._num_computed[r.slot]) for r in work.computed]
            )
        output.start_ns, output.end_ns = int(work.start * 1e9), int(work.end * 1e9)
        return DoneOutput(output) if self._instant else TimedOutput(output)

    def _send(self, work: _FakeStep) -> None:
        """Do nothing: one rank stands for all stages."""

    def _output(self, step: StepInput, sampled: list[_Sampled]) -> StepOutput:
        def column(values: Iterable[int]) -> Int32:
            return np.fromiter(values, np.int32)

        output = StepOutput(step.step_id, 0, 0, column(t for row in sampled for t in row.tokens))
        if step.num_drafts:
            output.sizes = column(len(row.tokens) for row in sampled)
            output.num_drafts = column(row.num_drafts for row in sampled)
        guesses = [(row.guess, row.tokens[-1]) for row in sampled if row.guess is not None]
        output.num_unverified = len(guesses)
        output.num_unverified_right = sum(guess == token for guess, token in guesses)
        if self._proposer is not None and any(self._controls[r.slot].has_grammar for r in sampled):
            output.next_sizes = column(len(self._drafts[row.slot]) for row in sampled)
            output.next_drafts = column(t for row in sampled for t in self._drafts[row.slot])
        if any(self._controls[row.slot].logprobs >= 0 for row in sampled):
            output.logprobs = self._logprobs(sampled)
        return output

    def settle(self) -> None:
        """Do nothing: there are no other ranks."""

    def reset(self) -> None:
        """Forget all requests. The cache stays as it is."""
        for rows in (self._tokens, self._blocks, self._drafts):
            for row in rows:
                row.clear()
        self._masks.forced.clear()

    def memory_use(self, call: MemoryUse) -> CallResult:
        """Return zeros: the device has no weights, and its cache is a script's."""
        return {"weights": 0, "kv_cache": 0}

    def sleep(self, call: Sleep) -> CallResult:
        """Drop the content of the cache. There are no weights."""
        self._is_asleep = True
        self._cache = []
        return {"freed_bytes": 0}

    def wake_up(self, call: WakeUp) -> CallResult:
        """Make the cache again, if the device sleeps."""
        if self._is_asleep:
            self._is_asleep, self._cache = False, self._empty_cache()
        return {}

    def prepare_weights(self, call: PrepareWeights) -> CallResult:
        """Refuse: the tokens follow from a script."""
        raise CallRefusedError("the fake device has no weights")

    def _empty_cache(self) -> list[list[int]]:
        return [[0] * self._block_size for _ in range(self._num_blocks)]

    def _take_requests(self, step: StepInput) -> None:
        for record, (slot, positions, tokens, _, controls) in zip(
            step.entering, step.entering_rows(), strict=True
        ):
            self._records[slot] = record
            self._num_computed[slot] = int(record["num_computed"])
            self._tokens[slot] = [-1] * positions.start + step.new_token_ids[tokens].tolist()
            self._controls[slot] = decode_controls(step.new_controls[controls].tobytes())
            self._blocks[slot] = []
            self._drafts[slot] = []
            if self._proposer is not None:
                self._proposer.begin(slot, np.array(self._tokens[slot], np.int32))

    def _logprobs(self, sampled: list[_Sampled]) -> UInt8:
        """Return the logprobs of rows that ask for them, if only for those of their own tokens."""
        found = [
            (row, token, candidates(state, most, self._vocab_size))
            for row, one in enumerate(sampled)
            if (most := self._controls[one.slot].logprobs) >= 0
            for token, state in zip(one.tokens, one.states, strict=True)
        ]
        count = len(found)
        return LogprobColumns(
            keys=np.array([row for row, _, _ in found], np.int32),
            positions=np.zeros(count, np.int32),
            sizes=np.array([1 + len(best) for _, _, best in found], np.int32),
            ranks=np.ones(count, np.int32),
            token_ids=np.array(
                [t for _, token, best in found for t in (token, *(b for _, b in best))], np.int32
            ),
            logprobs=np.array(
                [v for _, _, best in found for v in (0.0, *(a for a, _ in best))], np.float32
            ),
        ).pack()

    def _compute_row(self, step: StepInput, slot: int, count: int) -> _Computed | None:
        """Compute a row's tokens and drafts; return None if the row does not sample."""
        first, tokens, drafts = self._num_computed[slot], self._tokens[slot], self._drafts[slot]
        left = self._records["max_total"][slot] - first - count
        assert left >= 0, "a row behind the end of its request"
        num = min(step.num_drafts, len(drafts), left)
        states = self._compute_tokens(step, slot, tokens[first : first + count], drafts[:num])
        self._num_computed[slot] = first + count
        if self._pooler is not None:
            self._pooler.add(slot, first, states)
        if first + count < self._records["num_known"][slot]:
            return None
        return _Computed(slot, states[count - 1 :])

    def _sample_row(self, step: StepInput, row: _Computed, masks: list[Int64] | None) -> _Sampled:
        """Sample the token at each position, and accept a draft while it is the same."""
        slot, drafts, num = row.slot, self._drafts[row.slot], len(row.states) - 1
        if masks is not None:
            num = min(num, len(masks) - 1)
        new = list[int]()
        for index, state in enumerate(row.states[: 1 + num]):
            new.append(self._sample(slot, state, None if masks is None else masks[index]))
            if index == num or drafts[index] != new[-1]:
                break
        accepted = len(new) - 1
        guess = drafts[num] if accepted == num < len(drafts) else None
        del self._tokens[slot][self._num_computed[slot] :]
        self._tokens[slot] += new
        self._num_computed[slot] += accepted
        self._known_from[slot] = step.beat + self._num_stages
        self._propose(slot, new)
        return _Sampled(slot, new, row.states[: len(new)], num, guess)

    def _sample(self, slot: int, state: int, allowed: Int64 | None) -> int:
        seed = int(self._records["seed"][slot])
        token = next_token(state, seed, self._vocab_size if allowed is None else len(allowed))
        return token if allowed is None else int(allowed[token])

    def _propose(self, slot: int, new: list[int]) -> None:
        """Draft what follows the tokens that a slot has just sampled."""
        most = int(self._records["max_drafts"][slot])
        if self._proposer is None or not most:
            return
        forced = self._masks.forced.pop(slot, _NO_IDS)
        drafts = drafts_of_forced(forced, np.array(new, np.int32))[:most]
        if not len(drafts):
            tokens = np.array(self._tokens[slot], np.int32)
            drafts = self._proposer.propose(slot, tokens, most)
        self._drafts[slot] = drafts.tolist()

    def _next_tokens(self, slot: int, count: int) -> Int32:
        """Return the tokens that the device will sample for a slot without masks."""
        state, tokens = self._state_before(slot), [self._tokens[slot][-1]]
        for _ in range(count):
            state = chain(state, tokens[-1])
            tokens.append(self._sample(slot, state, None))
        return np.array(tokens[1:], np.int32)

    def _state_before(self, slot: int) -> int:
        """Return the hash of all tokens that a slot has computed."""
        first, size = self._num_computed[slot], self._block_size
        if not first:
            return 0
        blocks = self._blocks[slot] if self._has_full else self._windows[0].blocks[slot]
        return self._cache[blocks[(first - 1) // size]][(first - 1) % size]

    def _compute_tokens(
        self, step: StepInput, slot: int, tokens: list[int], drafts: list[int]
    ) -> list[int]:
        """Compute tokens behind those computed before, and return the hash at each of them."""
        first, num_known = self._num_computed[slot], self._records["num_known"][slot]
        blocks, size = self._blocks[slot], self._block_size
        tokens = [*tokens, *drafts]
        assert first + len(tokens) <= num_known or self._known_from[slot] <= step.beat, (
            "the first stage has not got its token"
        )
        state, states = self._state_before(slot), []
        known = [*self._tokens[slot][:first], *tokens] if self._windows else []
        for position, token in enumerate(tokens, first):
            state = chain(state, token)
            if self._has_full:
                self._cache[blocks[position // size]][position % size] = state
            for window in self._windows:
                self._cache[window.blocks[slot][position // size]][position % size] = state
                window.check(self._cache, slot, position, known)
            states.append(state)
        own = int(self._records["state"][slot])
        if own >= 0:
            before = self._state_before(slot)
            self._states.compute(step, slot, own, before, states, len(drafts))
        return states
