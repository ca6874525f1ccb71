"""Perplexity of a text: windows with log-probabilities of their tokens, and their sum."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from sidestep.frontend.evaluation.subject import Subject
from sidestep.frontend.evaluation.units import Figures, Result, Unit, greedy
from sidestep.frontend.evaluation.windows import Window, check_sizes, make_windows
from sidestep.frontend.input.tokenizer import Tokenizer
from sidestep.frontend.options.eval_options import EvalArgs
from sidestep.frontend.output.outputs import Logprob, RequestOutput
from sidestep.ipc.common.errors import SidestepError, ValidationError
from sidestep.ipc.config_sections import DEFAULT_MODEL

CONTEXT = 1024
"""Tokens of a window by default."""
_CARD = Path(DEFAULT_MODEL) / "README.md"
"""Text that is part of every install."""
_PROBE = "a"
"""Text whose tokens show the special tokens that a tokenizer puts around every text."""


@dataclass(frozen=True)
class Tokens:
    """Log-probabilities of n tokens, each with those of the k most probable ones in its place."""

    ids: npt.NDArray[np.int32]
    """[n, 1 + k] The token, then the most probable tokens without it; -1 where there is none."""
    logprobs: npt.NDArray[np.float32]
    """[n, 1 + k] Natural logarithms of their probabilities."""
    best: npt.NDArray[np.int32]
    """[n] The most probable token; -1 with k=0, unless it is the token itself."""

    @classmethod
    def from_entries(cls, entries: Sequence[Mapping[int, Logprob]], most: int) -> Self:
        """Return the tokens of an output's entries, whose first is the token itself."""
        ids = np.full((len(entries), 1 + most), -1, np.int32)
        logprobs = np.full((len(entries), 1 + most), -np.inf, np.float32)
        best = np.full(len(entries), -1, np.int32)
        for row, found in enumerate(entries):
            ids[row, : len(found)] = list(found)
            logprobs[row, : len(found)] = [one.logprob for one in found.values()]
            best[row] = next((token for token, one in found.items() if one.rank == 1), -1)
        return cls(ids, logprobs, best)

    def to_result(self) -> Result:
        """Return the arrays as text that JSON can hold."""
        return {
            "shape": list(self.ids.shape),
            "ids": _encode(self.ids),
            "logprobs": _encode(self.logprobs),
            "best": _encode(self.best),
        }

    @classmethod
    def from_result(cls, result: Result) -> Self:
        """Return the tokens of `to_result`."""
        shape = tuple(result["shape"])
        return cls(
            np.frombuffer(base64.b64decode(result["ids"]), np.int32).reshape(shape),
            np.frombuffer(base64.b64decode(result["logprobs"]), np.float32).reshape(shape),
            np.frombuffer(base64.b64decode(result["best"]), np.int32),
        )


def _encode(array: npt.NDArray[Any]) -> str:
    return base64.b64encode(array.tobytes()).decode()


class Perplexity:
    """The suite of a text. It has the same windows for each model."""

    name = "perplexity"

    def __init__(self, args: EvalArgs, subjects: Sequence[Subject]) -> None:
        """Read the text and check its tokens and the sizes; raises ValidationError, OSError."""
        self.path = Path(args.text) if args.text is not None else _CARD
        content = self.path.read_bytes()
        self.digest = hashlib.sha256(content).hexdigest()
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise ValidationError("text", f"{self.path} is not UTF-8: {error}") from None
        each = [split_ids(subject.tokenizer, text) for subject in subjects]
        for subject, found in zip(subjects[1:], each[1:], strict=True):
            _check_same(each[0], found, subject.arguments.model)
        self.before, self.ids = each[0]
        longest = min(subject.config.max_model_len for subject in subjects) - 1
        self.context = min(CONTEXT, longest) if args.context is None else args.context
        if self.context > longest:
            raise ValidationError(
                "context",
                f"{self.context} is more than {longest}, the longest prompt of the model",
            )
        room, self.stride = check_sizes(self.context, args.stride, len(self.before))
        self.windows = list(make_windows(len(self.ids), room, self.stride, len(self.before)))
        if not self.windows:
            raise ValidationError("text", f"{self.path} has no token that follows another one")
        vocab_size = min(subject.config.spec.vocab_size for subject in subjects)
        self.most = min(args.kl_tokens, vocab_size) if len(subjects) > 1 else 0

    def units(self, subject: Subject) -> list[Unit]:
        """Return the windows as prompts."""
        params = greedy(1, prompt_logprobs=self.most, detokenize=False)
        return [
            Unit(
                f"window {number}",
                self.before + self.ids[window.begin : window.end],
                params,
                partial(self._score, window),
            )
            for number, window in enumerate(self.windows, 1)
        ]

    def _score(self, window: Window, output: RequestOutput) -> Result:
        entries = (output.prompt_logprobs or [])[-window.num_counted :]
        found = [one for one in entries if one is not None]
        if len(found) != window.num_counted:
            raise SidestepError("the engine gave no log-probabilities of the prompt's tokens")
        return Tokens.from_entries(found, self.most).to_result()

    def figures(self, results: Mapping[str, Result]) -> Figures:
        """Return the perplexity and what it was computed from.

        The sum is exact, so that it does not depend on the order of the windows' results.
        """
        own = [Tokens.from_result(one).logprobs[:, 0] for one in results.values()]
        nll = -math.fsum(float(value) for window in own for value in window)
        tokens = sum(map(len, own))
        return {
            "perplexity": exponential(nll / tokens),
            "nll_per_token": nll / tokens,
            "nll": nll,
            "tokens": tokens,
            "uncounted_tokens": len(self.ids) - tokens,
            "windows": len(own),
            "context": self.context,
            "stride": self.stride,
        }


def exponential(value: float) -> float:
    """Return e to this power; infinity where a float cannot hold it."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def split_ids(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[int]]:
    """Return the special tokens that the tokenizer puts before every text, and the text's own ids.

    Special tokens behind a text are left out: nothing of the text follows them.
    """
    plain = tokenizer.encode(_PROBE, add_special_tokens=False)
    full = tokenizer.encode(_PROBE)
    places = range(len(full) - len(plain) + 1)
    before = next((full[:i] for i in places if full[i : i + len(plain)] == plain), [])
    return before, tokenizer.encode(text, add_special_tokens=False)


def _check_same(
    ours: tuple[list[int], list[int]], others: tuple[list[int], list[int]], model: str
) -> None:
    """Raise ValidationError if two models have different tokens for the text."""
    if ours[0] != others[0]:
        raise ValidationError(
            "against",
            f"{model} begins a text with the tokens {others[0]}, the model with {ours[0]}",
        )
    if ours[1] == others[1]:
        return
    pairs = zip(*(both := (ours[1], others[1])), strict=False)
    shorter = min(map(len, both))
    place = next((i for i, (one, other) in enumerate(pairs) if one != other), shorter)
    raise ValidationError(
        "against",
        f"{model} has other token ids for the text, from token {place} on, so the two cannot be "
        "compared token by token",
    )
