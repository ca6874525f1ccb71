"""Grammars of a vocabulary of single characters, compiled when asked for.

The module also computes the expected tokens of a request that has such a grammar.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from sidestep.engine_core.requests.mask_job import FOREVER
from sidestep.engine_core.requests.request import Request, grammars_of
from sidestep.engine_core.structured_outputs.grammars import Grammars, _Compilation
from sidestep.executor.runner.fake import next_token
from sidestep.executor.runner.fake_parts import chain
from sidestep.frontend.input.output_form import make_grammar
from sidestep.ipc.params.structured_outputs_params import (
    Grammar,
    StructuredOutputsParams,
    grammar_limits,
)
from sidestep.ipc.transport.step import Int32
from tests.fakes import VOCAB_SIZE

EOS = 0
_CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,:;-+*/(){}["


def _tokenizer() -> str:
    """Return a tokenizer: token 0 ends an output; token i is the i-th character."""
    vocab = {"<eos>": EOS} | {character: i for i, character in enumerate(_CHARACTERS, 1)}
    assert len(vocab) == VOCAB_SIZE
    end = {
        "id": EOS,
        "content": "<eos>",
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [end],
            "model": {"type": "BPE", "vocab": vocab, "merges": []},
            "pre_tokenizer": {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": True,
                "use_regex": False,
            },
            "decoder": {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": True,
                "use_regex": False,
            },
        }
    )


class SmallGrammars(Grammars):
    """Grammars that no thread compiles.

    Each is compiled when the caller goes on, and known in the next step.
    """

    rng = random.Random(0)
    late_share = 0.0
    """Share of the masks that may be late."""
    mask_seconds: Sequence[float] = (0.0,)
    """Seconds that masks appear to take; each mask gets one of these at random."""

    def __init__(self, clock: Callable[[], float]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "tokenizer.json").write_text(_tokenizer())
            super().__init__(folder, VOCAB_SIZE, (EOS,), clock, num_threads=0, num_workers=1)
            self.load()

    def _give(self, compilation: _Compilation) -> None:
        super()._give(compilation)
        assert self._tokenizer is not None
        self._jobs.get().compile(self._tokenizer)
        self._done.put(compilation)
        self._bell.ring()

    def masks(
        self, requests: Sequence[Request], most_late: int, patience_s: float, longest_s: float
    ) -> list[Int32 | None]:
        found = super().masks(requests, most_late, patience_s, longest_s)
        if longest_s == FOREVER:
            return found
        for grammar in grammars_of(requests):
            grammar.mask_s = self.rng.choice(self.mask_seconds)
        return [None if self.rng.random() < self.late_share else mask for mask in found]

    def forget_all(self) -> None:
        """Forget all grammars, so that the next request with any grammar has to wait for it."""
        self._cache.clear()

    def expected_tokens(
        self, grammar: Grammar, prompt: list[int], count: int, seed: int
    ) -> list[int]:
        """Return the tokens that a request must give, whatever runs beside it."""
        assert self._tokenizer is not None
        return expected_in_grammar(self._tokenizer, grammar.text, prompt, count, seed)


def expected_in_grammar(
    tokenizer: LLTokenizer, grammar: str, prompt: Sequence[int], count: int, seed: int
) -> list[int]:
    """Return the tokens that a request with a grammar must give.

    grammar: as llguidance reads it.
    """
    matcher = LLMatcher(tokenizer, grammar, limits=grammar_limits())
    state, tokens = 0, list[int]()
    for token in prompt:
        state = chain(state, token)
    while len(tokens) < count and not matcher.is_stopped():
        allowed = np.flatnonzero(
            np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        )
        tokens.append(int(allowed[next_token(state, seed, len(allowed))]))
        assert matcher.consume_token(tokens[-1])
        state = chain(state, tokens[-1])
    return tokens


def matcher_of(request: Request) -> LLMatcher:
    """Return the matcher of a request whose grammar has been compiled."""
    assert request.grammar is not None and request.grammar.matcher is not None
    return request.grammar.matcher


def small_grammar(regex: str) -> Grammar:
    """Return the grammar of a regular expression over those characters."""
    return make_grammar(StructuredOutputsParams(regex=regex), {})
