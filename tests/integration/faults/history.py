"""The history of each client, and the check of it against what the client must have got.

A request is complete and exact, or it ended with an error that names the cause. In both cases the
tokens that came are the first of those that it must give: none is missing, none came twice.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from sidestep import BeamSearchOutput, EngineDeadError, RequestError, RequestOutput
from sidestep.ipc.params.sampling_params import RequestOutputKind
from tests.integration.faults.asks import EOS, Ask, Reference


@dataclass
class History:
    """The outputs that one client got, put together as a client does it."""

    ask: Ask
    tokens: dict[int, list[int]] = field(default_factory=dict)
    """By choice, or by beam."""
    logprobs: dict[int, list[set[int]]] = field(default_factory=dict)
    """By choice: the tokens whose log-probabilities came with each token."""
    ends: dict[int, str] = field(default_factory=dict)
    """The reason of each choice's end."""
    num_outputs: int = 0
    has_left: bool = False
    error: BaseException | None = None
    problems: list[str] = field(default_factory=list)
    """Faults in the order of the outputs."""

    def take(self, output: RequestOutput) -> None:
        """Take the next output of the stream."""
        self.num_outputs += 1
        for choice in output.outputs:
            index, new = choice.index, list(choice.token_ids)
            old = self.tokens.setdefault(index, [])
            ids = [set(one) for one in choice.logprobs or ()]
            if index in self.ends and (new != old or not self._is_whole):
                if new:
                    self.problems.append(f"choice {index} went on after its end")
                continue
            if self._is_whole:
                if new[: len(old)] != old:
                    self.problems.append(f"choice {index} took back tokens: {old} became {new}")
                self.tokens[index], self.logprobs[index] = new, ids
            else:
                old += new
                self.logprobs.setdefault(index, []).extend(ids)
            if choice.finish_reason is not None:
                self.ends[index] = choice.finish_reason

    @property
    def _is_whole(self) -> bool:
        """Whether each output has all tokens so far."""
        return self.ask.output_kind is not RequestOutputKind.DELTA

    def take_beams(self, output: BeamSearchOutput) -> None:
        """Take the result of a search."""
        self.num_outputs += 1
        for index, beam in enumerate(output.sequences):
            self.tokens[index] = beam.tokens[len(self.ask.prompt) :]
            self.ends[index] = beam.finish_reason

    def check(
        self,
        reference: Reference,
        *,
        must_complete: bool,
        causes: Sequence[str],
        may_blame: bool = False,
    ) -> list[str]:
        """Return what is wrong with the history.

        must_complete: whether the engine had to serve it to its end. causes: patterns, one of which
        the error of a request matches that was not served. may_blame: whether a worker may name it
        as the cause of a failed step, so that it ends alone.
        """
        expected, problems = reference.choices(self.ask), list(self.problems)
        for index, tokens in self.tokens.items():
            problems += self._check_tokens(index, tokens, expected[index])
            if self.ask.logprobs is not None:
                wanted = reference.logprob_ids(self.ask, tokens)
                if self.logprobs.get(index, []) != wanted:
                    problems.append(f"choice {index} has other logprobs than its own")
        if self.has_left:
            return problems
        if may_blame and isinstance(self.error, RequestError):
            problems += self._check_cause(causes)
        elif self.error is not None:
            problems += self._check_error(must_complete, causes)
        elif sorted(self.ends) != list(range(len(expected))):
            problems.append(f"ended with choices {sorted(self.ends)} of {len(expected)}")
        return problems

    def _check_tokens(self, index: int, tokens: list[int], expected: list[int]) -> list[str]:
        if tokens != expected[: len(tokens)]:
            at = next(i for i, token in enumerate(tokens) if token not in expected[i : i + 1])
            return [f"choice {index} got {tokens}, not {expected}: they differ at {at}"]
        rest = expected[len(tokens) :]
        if self.ends.get(index) == "abort" and self.ask.aborts_after is not None:
            return []
        if index in self.ends and self.ends[index] not in ("stop", "length"):
            return [f"choice {index} ended by {self.ends[index]!r}"]
        # A client gets no end of sequence; other requests ignore it, so theirs is a plain token.
        hidden = [EOS] if self.ask.regex is not None or self.ask.beam_width else []
        if index in self.ends and rest not in ([], hidden):
            return [f"choice {index} ended after {len(tokens)} of {len(expected)} tokens"]
        return []

    def _check_error(self, must_complete: bool, causes: Sequence[str]) -> list[str]:
        told = f"{type(self.error).__name__}: {self.error}"
        if must_complete:
            return [f"was lost, though a replica could go on: {told}"]
        if not isinstance(self.error, EngineDeadError):
            return [f"ended with another error than the engine's death: {told}"]
        return self._check_cause(causes)

    def _check_cause(self, causes: Sequence[str]) -> list[str]:
        told = f"{type(self.error).__name__}: {self.error}"
        if not any(re.search(cause, told) for cause in causes):
            return [f"ended with an error that names no cause of {list(causes)}: {told}"]
        return []
