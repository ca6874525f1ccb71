"""How far the tokens of one request are known, computed and in flight."""

from __future__ import annotations

from dataclasses import dataclass

from sidestep.engine_core.requests.life import Life, RequestStatus


@dataclass(slots=True, eq=False, kw_only=True)
class Progress(Life):
    """The tokens of a request, and the counts that its rows change.

    Steps in flight count as if they accepted all of their drafts, until they are back.
    """

    token_ids: list[int]
    """The prompt, then the known outputs."""
    num_prompt: int
    max_total: int
    """Prompt plus the most outputs it may have."""
    num_computed: int = 0
    """Tokens computed, or being computed by a step in flight if it accepts all of its drafts."""
    num_placeholders: int = 0
    """Tokens that steps in flight will add if they accept all of their drafts."""
    num_sampling: int = 0
    """Steps in flight that sample for it: each adds at least one token."""
    num_in_flight: int = 0
    """Steps in flight that touch its slot and blocks."""
    next_beat: int = 0
    """First beat of the pipeline in which the first stage has its token and can go on."""
    is_new: bool = False
    """Whether the worker's row of its slot is still an older one, of another request or its own."""

    @property
    def num_outputs(self) -> int:
        """Known output tokens."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_to_compute(self) -> int:
        """Tokens that are known, or in flight, and not computed."""
        return len(self.token_ids) + self.num_placeholders - self.num_computed

    def continue_at(self, num_computed: int) -> None:
        """Note that its blocks, which it has just got, hold its first tokens.

        For the workers its next row is the first one of a new request.
        """
        self.num_computed = num_computed
        self.is_new = True

    def entered(self) -> None:
        """Note that the row just planned tells the worker all of the request."""
        self.is_new = False

    def plan_row(self, num_tokens: int, next_beat: int) -> bool:
        """Note a row of known or sampled tokens in the next step; return whether it samples.

        next_beat: when the first stage has the token that the row samples.
        """
        self.num_computed += num_tokens
        self.num_in_flight += 1
        samples = self.num_computed >= len(self.token_ids)
        if samples:
            self.num_placeholders += 1
            self.num_sampling += 1
            self.next_beat = next_beat
        return samples

    def plan_drafts(self, num_drafts: int) -> None:
        """Note that the row just planned may accept this many drafts."""
        self.num_computed += num_drafts
        self.num_placeholders += num_drafts

    def take_sample(self, num_drafts: int, num_accepted: int) -> None:
        """Note that the oldest step that samples is back.

        num_drafts: drafts it was planned with. num_accepted: drafts that it has accepted.
        """
        self.num_sampling -= 1
        self.num_placeholders -= 1
        if num_drafts:
            self.num_placeholders -= num_drafts
            self.num_computed -= num_drafts - num_accepted

    def postpone_sample(self, num_drafts: int) -> None:
        """Take a sample out of the newest step; the next step computes the token again.

        For the workers it is as if the request entered in that next step, with all its known
        tokens.
        """
        self.num_sampling -= 1
        self.num_placeholders -= 1 + num_drafts
        self.num_computed -= 1 + num_drafts
        self.is_new = True

    def take_back_row(self, num_tokens: int, num_drafts: int, *, samples: bool) -> None:
        """Take back a row of a step that was not computed; arguments: as it was planned."""
        self.num_in_flight -= 1
        self.num_computed -= num_tokens + num_drafts
        self.num_placeholders -= num_drafts
        if samples:
            self.num_placeholders -= 1
            self.num_sampling -= 1

    def row_is_back(self) -> bool:
        """Note that the oldest step with a row of the request is back.

        Return whether it has stopped running and no other step touches its slot and blocks.
        """
        self.num_in_flight -= 1
        return self.num_in_flight == 0 and self.status is not RequestStatus.RUNNING
