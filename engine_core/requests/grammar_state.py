"""All that the core keeps of one request's grammar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sidestep.engine_core.requests.mask_account import MaskAccount
from sidestep.engine_core.requests.mask_job import MaskJob
from sidestep.ipc.transport.step import Int32

if TYPE_CHECKING:
    from llguidance import LLMatcher


@dataclass(slots=True, eq=False)
class GrammarState:
    """A request's place in its grammar, and its masks. `begin` gives it a compiled grammar."""

    field: str
    """Name of the field in which its user gave the grammar."""
    request_account: MaskAccount | None = None
    """Time of the masks of all choices of the request."""
    matcher: LLMatcher | None = None
    """State of the output in the grammar; None until the grammar is compiled."""
    text: str = ""
    """Text of the grammar; requests with the same text have the same grammar."""
    compilation: int = 0
    """Number of the compilation that its matcher was copied from."""
    grammar_account: MaskAccount | None = None
    """Time of the masks of all requests with this grammar."""
    end: int = -1
    """Index, among the tokens of the step that came last, of the one that ends the grammar.

    -1 if the grammar goes on.
    """
    next_drafts: Sequence[int] = ()
    """Drafts that the worker has for the request's next step."""
    job: MaskJob | None = None
    """Job that computes its next mask; None between steps."""
    row: int = 0
    """Row of its mask in `job`."""
    mask_s: float = 0.0
    """Seconds of a processor that its last mask took."""
    num_left_out: int = 0
    """Steps that left the request out because its masks take long."""
    mask_index: int = 0
    """Mask index of its last mask; see engine_core/structured_outputs/mask_table.py."""

    def __repr__(self) -> str:
        return f"GrammarState({self.field!r}, ready={self.matcher is not None}, end={self.end})"

    def begin(
        self,
        matcher: LLMatcher,
        *,
        text: str,
        compilation: int,
        mask_s: float,
        account: MaskAccount,
    ) -> None:
        """Take a matcher, of its own, at the beginning of the compiled grammar.

        mask_s: seconds of a processor that the grammar's first mask took. account: that of all
        requests with this grammar.
        """
        self.matcher, self.text, self.compilation = matcher, text, compilation
        self.mask_s, self.grammar_account = mask_s, account

    def followed(self, end: int) -> None:
        """Note that the matcher has taken a step's tokens. end: see the field of this name."""
        self.end = end

    def expect(self, drafts: Sequence[int]) -> None:
        """Note the drafts that the worker has for the request's next step."""
        self.next_drafts = drafts

    def ask(self, job: MaskJob, row: int) -> None:
        """Note that this row of a job is its next mask."""
        self.job, self.row = job, row

    def take_mask(self) -> Int32 | None:
        """Take the mask of its job, which is done; None if the job did not come to it in time."""
        job, self.job = self.job, None
        assert job is not None and job.is_done
        if self.row >= len(job.seconds):
            # A row that was not begun in time will take as long as the others.
            self.mask_s = max(self.mask_s, sum(job.seconds) / max(1, len(job.seconds)))
            return None
        self.mask_s = job.seconds[self.row]
        mask: Int32 = job.masks[self.row]
        return mask

    def mask_sent(self, index: int) -> None:
        """Note the mask index of its last mask."""
        self.mask_index = index

    def leave_out(self) -> None:
        """Note that a step leaves the request out because its masks take long."""
        self.num_left_out += 1

    def charge(self) -> str | None:
        """Charge the time of the last mask to both accounts.

        Return why there may be no more masks; None if there may.
        """
        for account in (self.request_account, self.grammar_account):
            if account is not None:
                account.charge(self.mask_s)
                if (problem := account.problem()) is not None:
                    return problem
        return None
