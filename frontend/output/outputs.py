"""What users get back."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RequestMetrics:
    """A request's times, in seconds of time.monotonic()."""

    arrival_time: float
    """The call."""
    queued_ts: float | None = None
    """Checked, tokenised and sent to the engine core."""
    scheduled_ts: float | None = None
    """First step that it was part of."""
    first_token_ts: float | None = None
    last_token_ts: float | None = None
    num_generation_tokens: int = 0
    num_preemptions: int = 0

    @property
    def first_token_latency(self) -> float | None:
        """Seconds from the call to the first token's arrival in the frontend (TTFT)."""
        return None if self.first_token_ts is None else self.first_token_ts - self.arrival_time


@dataclass(slots=True)
class Logprob:
    """How probable the model itself found a token: before penalties, masks, temperature and
    filters.
    """

    logprob: float
    """Natural logarithm."""
    rank: int
    """1 for the most probable token."""
    decoded_token: str | None = None
    """The token alone as text; None without detokenize."""


@dataclass(slots=True)
class CompletionOutput:
    """One completion: all of it so far, or what is new, as `output_kind` says."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    """'stop', 'length', 'repetition' or 'abort'; None while it goes on."""
    stop_reason: int | str | None = None
    """The stop token's id or the stop text; None for end of sequence; 'deadline' where that ended
    it."""
    logprobs: list[dict[int, Logprob]] | None = None
    """With `logprobs`: for each of `token_ids` a dict by token id, itself first, then the most
    probable ones."""
    cumulative_logprob: float | None = None
    """With `logprobs`: the sum over all tokens so far."""

    def finished(self) -> bool:
        """Whether nothing follows."""
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
    """With `prompt_logprobs`: as `logprobs`, for each token of the prompt; None for the first,
    which nothing comes before. A DELTA stream has them in its first output alone."""


@dataclass(slots=True)
class BeamSearchSequence:
    """One continuation that a beam search has found."""

    tokens: list[int]
    """The prompt's, and those of the continuation."""
    text: str
    """Of the continuation."""
    cum_logprob: float
    """Of the continuation's tokens, end of sequence included."""
    score: float
    """cum_logprob / length ** length_penalty: what continuations are compared by."""
    finish_reason: str
    """'stop' at end of sequence, 'length', or 'abort' where the deadline cut it short."""
    stop_reason: int | str | None = None
    """'deadline' where that ended it."""


@dataclass(slots=True)
class BeamSearchOutput:
    """What a beam search has found, the best first."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    sequences: list[BeamSearchSequence]
    """`beam_width` of them; fewer only after an abort."""
    metrics: RequestMetrics
    num_cached_tokens: int | None = None
    """Prompt tokens that were found in the prefix cache."""
