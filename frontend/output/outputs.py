"""The outputs of requests, as users get them."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(slots=True)
class RequestMetrics:
    """A request's times, in seconds of time.monotonic(), and its counts.

    The counts of drafts come from the engine core with the request's end. They are None before
    that, without speculation, and for a request that its text or its caller has ended.
    """

    arrival_time: float
    """Time of the call."""
    queued_ts: float | None = None
    """Time at which it was checked, tokenised and sent to the engine core."""
    scheduled_ts: float | None = None
    """Time of the first step that it was part of."""
    first_token_ts: float | None = None
    last_token_ts: float | None = None
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    num_drafts: int | None = None
    """Steps in which it verified drafts."""
    num_draft_tokens: int | None = None
    """Drafts that it verified."""
    num_accepted_tokens: int | None = None
    """Drafts that were accepted.

    It may be more than was told, if the request ended within a step's tokens.
    """

    @property
    def acceptance_length(self) -> float | None:
        """Tokens of a step that verified drafts, on average: the accepted ones and one more.

        None without such a step.
        """
        if not self.num_drafts or self.num_accepted_tokens is None:
            return None
        return 1 + self.num_accepted_tokens / self.num_drafts

    @property
    def first_token_latency(self) -> float | None:
        """Seconds from the call to the first token's arrival in the frontend (TTFT)."""
        return None if self.first_token_ts is None else self.first_token_ts - self.arrival_time

    def without_tokens(self) -> RequestMetrics:
        """Return the same times with the counts of a request that gave no tokens."""
        return replace(
            self,
            num_generation_tokens=0,
            num_drafts=None,
            num_draft_tokens=None,
            num_accepted_tokens=None,
        )


@dataclass(slots=True)
class Logprob:
    """The probability that the model itself gave a token.

    It is taken before penalties, masks, temperature and filters.
    """

    logprob: float
    """Natural logarithm of the probability."""
    rank: int
    """Rank of the token; 1 for the most probable one."""
    decoded_token: str | None = None
    """The token alone as text; None without detokenize."""


@dataclass(slots=True)
class CompletionOutput:
    """One completion: all of it so far, or its new part, as `output_kind` says."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    """'stop', 'length', 'repetition' or 'abort'; None while it is running."""
    stop_reason: int | str | None = None
    """The stop token's id or the stop text.

    None for end of sequence; 'deadline' if the deadline ended it.
    """
    logprobs: list[dict[int, Logprob]] | None = None
    """With `logprobs`: a dict by token id for each of `token_ids`.

    It holds the token itself first, then the most probable ones.
    """
    cumulative_logprob: float | None = None
    """With `logprobs`: the sum over all tokens so far."""

    def finished(self) -> bool:
        """Return whether nothing follows."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """One output of a request's stream."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int | None = None
    """Prompt tokens that were found in the prefix cache; None before it is known."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """With `prompt_logprobs`: a dict as in `logprobs` for each token of the prompt.

    None for the first token, which follows no other. A DELTA stream has them in its first output
    alone.
    """


@dataclass(slots=True)
class BeamSearchSequence:
    """One continuation that a beam search has found."""

    tokens: list[int]
    """Token ids of the prompt and of the continuation."""
    text: str
    """Text of the continuation."""
    cum_logprob: float
    """Sum of the logprobs of the continuation's tokens, end of sequence included."""
    score: float
    """cum_logprob / length ** length_penalty, by which continuations are compared."""
    finish_reason: str
    """'stop' at end of sequence, 'length', or 'abort' if the deadline cut it short."""
    stop_reason: int | str | None = None
    """'deadline' if the deadline ended it."""


@dataclass(slots=True)
class BeamSearchOutput:
    """The result of a beam search, the best sequence first."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    sequences: list[BeamSearchSequence]
    """`beam_width` sequences; fewer only after an abort."""
    metrics: RequestMetrics
    num_cached_tokens: int | None = None
    """Prompt tokens that were found in the prefix cache."""
