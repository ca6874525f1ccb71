"""How many drafts each row of a step verifies, chosen from measured times and acceptance.

A step with drafts takes longer and gives more tokens. Both are learnt from the steps that come
back: the time of a step for each number of drafts and each power of two of rows, and how often a
draft is accepted at each position. The number with the most tokens a second wins. A few numbers
are tried (a GPU has captured steps for these), another one only if it is clearly better, and no
other one for some steps after that. So a batch for which drafts do not pay runs without any.

Without drafts in the step, the worker still compares the first draft of each row with the token
that the row samples. So acceptance is known while drafts are off.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sidestep.engine_core.scheduling.step_plan import StepPlan
from sidestep.ipc.model.speculative_config import SpeculativeConfig, tiers_of
from sidestep.ipc.transport.step import Int32, StepOutput

_WEIGHT = 0.1
"""Weight of a new time in a running mean."""
_WINDOW, _PRIOR = 100, 4
"""Number of the last drafts whose acceptance counts, and how many the rate at the start is like."""
_BETTER = 1.05
"""How many times as many tokens a second another number of drafts must promise."""
_STAYS, _TRIES = 16, 4
"""Steps for which a choice stays, and those for which a number is tried."""
_STALE = 1024
"""Steps after which a time that has not been measured again is tried once more, if it is close."""
_CLOSE = 0.7
"""Share of the best promise that makes a stale number worth another try."""
_OVERHEAD = 1.1
"""How many times as long a step with more drafts is assumed to take before one was measured."""


@dataclass(slots=True)
class _Time:
    """The measured time of a step's kind."""

    seconds: float = 0.0
    measured: int = 0
    """Times that it was measured."""
    last: int = 0
    """Number of the step that measured it last."""

    def learn(self, seconds: float, step: int) -> None:
        """Take the time of a step, and its number."""
        self.measured += 1
        # The first steps of a kind may have waited for memory, code or clocks: the least counts.
        if self.measured <= 3:
            self.seconds = seconds if self.measured == 1 else min(self.seconds, seconds)
        else:
            self.seconds += _WEIGHT * (seconds - self.seconds)
        self.seconds = max(self.seconds, 1e-9)
        self.last = step


@dataclass(slots=True)
class _Acceptance:
    """How often a draft is accepted, given that the one before it was."""

    right: float
    """Accepted drafts, the older the less."""
    total: float = _PRIOR
    """Drafts that could have been accepted, likewise."""

    @property
    def rate(self) -> float:
        """The share of accepted drafts, lately."""
        return self.right / self.total

    def learn(self, accepted: int, of: int) -> None:
        """Take the accepted drafts of a step, and how many could have been accepted."""
        if not of:
            return
        kept = _WINDOW / (_WINDOW + of)
        self.right = (self.right + accepted) * kept
        self.total = (self.total + of) * kept


@dataclass(slots=True)
class DraftCounts:
    """Counts of drafts since the start."""

    num_rows: int = 0
    """Rows that verified a draft."""
    num_drafts: int = 0
    num_accepted: int = 0
    by_position: list[int] = field(default_factory=list)
    """Accepted drafts at each position of a row."""

    def add(self, drafts: Int32, accepted: Int32) -> None:
        """Add a step's drafts. drafts: [rows] how many each row verified. accepted: [rows]."""
        self.num_rows += int((drafts > 0).sum())
        self.num_drafts += int(drafts.sum())
        self.num_accepted += int(accepted.sum())


class DraftBudget:
    """The choice of the number of drafts for one engine's steps."""

    def __init__(self, config: SpeculativeConfig | None) -> None:
        """Begin without measured times. config: None for an engine without speculation."""
        self._most = 0 if config is None else config.num_speculative_tokens
        self._is_fixed = config is not None and not config.adaptive
        self._tiers = tiers_of(self._most)
        # The first draft is rarely right in general, and a later one mostly is if those before are.
        rates = [0.5, *([0.8] * (self._most - 1))]
        self._accepted = [_Acceptance(rate * _PRIOR) for rate in rates]
        self._times: dict[tuple[int, int], _Time] = {}
        self._num_steps = 0
        self._chosen: dict[int, tuple[int, int]] = {}
        """By power of two of rows: the choice, and the number of the step from which on it may
        change."""
        self._last_choice = 0
        self.counts = DraftCounts(by_position=[0] * self._most)

    def __repr__(self) -> str:
        return f"DraftBudget({self._most} at most, {self.counts.num_accepted} accepted)"

    def choose(self, num_rows: int, most: int) -> int:
        """Return the drafts of each row of the next step, of `num_rows` rows; at most `most`."""
        self._last_choice = self._choose(num_rows, most)
        return self._last_choice

    def _choose(self, num_rows: int, most: int) -> int:
        if self._is_fixed:
            return max(tier for tier in self._tiers if tier <= max(0, most))
        kind = num_rows.bit_length()
        chosen, until = self._chosen.get(kind, (-1, 0))
        if self._num_steps >= until or chosen > most:
            chosen, stays = self._best(kind, chosen, most)
            self._chosen[kind] = (chosen, self._num_steps + stays)
        return chosen

    def _best(self, kind: int, chosen: int, most: int) -> tuple[int, int]:
        """Return the next choice, and the number of steps for which it stays."""
        tiers = [tier for tier in self._tiers if tier <= max(0, most)]
        promises = {tier: self._tokens(tier) / self._seconds(kind, tier) for tier in tiers}
        best = max(tiers, key=lambda tier: promises[tier])
        for tier in tiers:
            time = self._times.get((kind, tier))
            is_stale = time is not None and self._num_steps - time.last > _STALE
            if is_stale and tier != chosen and promises[tier] > _CLOSE * promises[best]:
                return tier, _TRIES
        if (kind, best) not in self._times:
            return best, _TRIES
        if chosen in promises and promises[best] < _BETTER * promises[chosen]:
            return chosen, _STAYS
        return best, _STAYS

    def _tokens(self, tier: int) -> float:
        """Return the tokens of a row that are expected with this many drafts."""
        tokens, reached = 1.0, 1.0
        for acceptance in self._accepted[:tier]:
            reached *= acceptance.rate
            tokens += reached
        return tokens

    def _seconds(self, kind: int, tier: int) -> float:
        """Return the time of a step, measured or assumed.

        The assumption favours a number that has not been tried, so that it is tried: more drafts
        take little longer, and fewer drafts are faster by as much as they are fewer.
        """
        if (time := self._times.get((kind, tier))) is not None:
            return time.seconds
        known = [t for k, t in self._times if k == kind]
        if not known:
            return 1.0 + self._most * tier  # first a few steps without drafts, which tell most
        nearest = min(known, key=lambda other: abs(other - tier))
        longer = (1 + tier) / (1 + nearest) if tier < nearest else _OVERHEAD
        return self._times[kind, nearest].seconds * longer

    def learn(self, plan: StepPlan, output: StepOutput) -> None:
        """Take a step that is back."""
        if not self._most or not plan.sampling:
            return
        self._num_steps += 1
        self._learn_acceptance(plan, output)
        if plan.num_prompts == 0:
            self._learn_time(plan, (output.end_ns - output.start_ns) / 1e9)

    def _learn_time(self, plan: StepPlan, seconds: float) -> None:
        time = self._times.setdefault((len(plan.rows).bit_length(), plan.num_drafts), _Time())
        time.learn(seconds, self._num_steps)

    def _learn_acceptance(self, plan: StepPlan, output: StepOutput) -> None:
        rows = len(plan.sampling)
        if not len(output.num_drafts):
            if plan.num_prompts == 0:
                self._accepted[0].learn(output.num_unverified_right, rows)
            return
        drafts, accepted = output.num_drafts, output.sizes - 1
        self.counts.add(drafts, accepted)
        before = rows
        for position in range(min(plan.num_drafts, self._most)):
            here = int((accepted > position).sum())
            self.counts.by_position[position] += here
            self._accepted[position].learn(here, before)
            before = here

    def stats(self) -> dict[str, float]:
        """Return counts for users and metrics; nothing without speculation."""
        if not self._most:
            return {}
        counts = self.counts
        return {
            "spec_decode_num_drafts": counts.num_rows,
            "spec_decode_num_draft_tokens": counts.num_drafts,
            "spec_decode_num_accepted_tokens": counts.num_accepted,
            "spec_decode_draft_length": self._last_choice,
            **{
                f"spec_decode_num_accepted_tokens_per_pos_{position}": number
                for position, number in enumerate(counts.by_position)
            },
        }
