"""Requests of the clients of a fault plan, and the tokens that each of them must get.

The tokens of the fake device follow from the positions of the KV cache that it reads. So they can
be computed without an engine, and a wrong block, a repeated step or a lost token changes them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import msgspec
from llguidance import LLTokenizer

from sidestep import BeamSearchParams, SamplingParams, StructuredOutputsParams
from sidestep.engine_core.structured_outputs.grammars import Grammars
from sidestep.executor.runner.fake import candidates, expected_tokens
from sidestep.executor.runner.fake_parts import chain
from sidestep.frontend.input.output_form import make_grammar
from sidestep.ipc.params.sampling_params import RequestOutputKind
from tests.small_grammars import expected_in_grammar
from tests.unit.engine_core.groups.test_beams import search_alone

EOS = 0


class Ask(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request of one client."""

    prompt: list[int]
    max_tokens: int
    seed: int
    frontend: int = 0
    n: int = 1
    beam_width: int = 0
    """Not 0 for a beam search."""
    regex: str | None = None
    logprobs: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.DELTA
    priority: int = 0
    leaves_after: int | None = None
    """Number of outputs after which its reader leaves."""
    aborts_after: int | None = None
    """Number of outputs after which its reader aborts it, and reads on to its end."""
    starts_after: int | None = None
    """Index of the ask whose first output, or end, it waits for; None to start at once."""

    @property
    def sampling(self) -> SamplingParams:
        """The parameters of a request that is no search."""
        structure = None if self.regex is None else StructuredOutputsParams(regex=self.regex)
        return SamplingParams(
            n=self.n,
            max_tokens=self.max_tokens,
            seed=self.seed,
            ignore_eos=structure is None,
            structured_outputs=structure,
            logprobs=self.logprobs,
            output_kind=self.output_kind,
        )

    @property
    def search(self) -> BeamSearchParams:
        """The parameters of a search."""
        return BeamSearchParams(beam_width=self.beam_width, max_tokens=self.max_tokens)


class Reference:
    """Computes what requests must give."""

    def __init__(self, folder: str, vocab_size: int) -> None:
        """Read the model's tokenizer, for grammars."""
        grammars = Grammars(folder, vocab_size, (EOS,), lambda: 0.0, num_workers=1)
        grammars.load()
        assert grammars._tokenizer is not None
        self._tokenizer: LLTokenizer = grammars._tokenizer
        self._vocab_size = vocab_size

    def choices(self, ask: Ask) -> list[list[int]]:
        """Return the tokens of each choice, or of each beam."""
        if ask.beam_width:
            return search_alone(ask.prompt, ask.search, (EOS,), vocab_size=self._vocab_size)
        return [self._tokens(ask, ask.sampling.for_choice(i).seed or 0) for i in range(ask.n)]

    def _tokens(self, ask: Ask, seed: int) -> list[int]:
        if ask.regex is None:
            return expected_tokens(ask.prompt, ask.max_tokens, seed, self._vocab_size)
        grammar = make_grammar(StructuredOutputsParams(regex=ask.regex), {})
        return expected_in_grammar(self._tokenizer, grammar.text, ask.prompt, ask.max_tokens, seed)

    def logprob_ids(self, ask: Ask, tokens: Sequence[int]) -> list[set[int]]:
        """Return the tokens whose log-probabilities come with each token of a choice."""
        assert ask.logprobs is not None
        state, found = functools.reduce(chain, ask.prompt, 0), list[set[int]]()
        for token in tokens:
            best = candidates(state, ask.logprobs, self._vocab_size)
            found.append({token, *(candidate for _, candidate in best)})
            state = chain(state, token)
        return found
