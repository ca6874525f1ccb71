"""The drafts that the steps of one request have verified."""

from __future__ import annotations

from dataclasses import dataclass

from sidestep.ipc.transport.messages import VerifiedDrafts


@dataclass(slots=True, eq=False)
class RequestDrafts:
    """Counts since the request came."""

    num_steps: int = 0
    """Steps that have verified drafts."""
    num_verified: int = 0
    """Drafts that have been verified."""
    num_accepted: int = 0
    """Drafts that have been accepted."""

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """Note that a step has verified this many drafts, at least one, and accepted some."""
        self.num_steps += 1
        self.num_verified += num_drafts
        self.num_accepted += num_accepted

    def message(self) -> VerifiedDrafts:
        """Return the counts for the frontend."""
        return VerifiedDrafts(
            num_drafts=self.num_steps,
            num_draft_tokens=self.num_verified,
            num_accepted_tokens=self.num_accepted,
        )
