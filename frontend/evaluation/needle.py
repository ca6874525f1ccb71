"""Needle in a haystack: a number that a long prompt holds once must be found again."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from functools import cache, partial

from sidestep.frontend.evaluation.subject import Subject
from sidestep.frontend.evaluation.units import Figures, Result, Unit, greedy
from sidestep.frontend.options.eval_options import EvalArgs
from sidestep.frontend.output.outputs import RequestOutput
from sidestep.ipc.common.errors import ValidationError

_TEXT_OUTPUT = 24
"""Most tokens of the output that continues a text, which begins with the number."""
_CITIES = ("Lisbon", "Oslo", "Nairobi", "Lima", "Kyoto", "Quito", "Cairo", "Perth", "Riga", "Turin")
_NOUNS = ("farmer", "teacher", "sailor", "baker", "child", "doctor", "painter", "driver")
_VERBS = ("visits", "remembers", "describes", "leaves", "watches", "repairs", "paints", "finds")
_THINGS = ("bridge", "garden", "harbour", "library", "market", "mill", "tower", "orchard")
_ADJECTIVES = ("old", "quiet", "green", "narrow", "bright", "distant", "empty", "wooden")
_TIMES = ("in the morning", "after the rain", "on Sundays", "in winter", "at night", "every year")


class Needle:
    """The suite of prompts with a number at several places, for several lengths."""

    name = "needle"

    def __init__(self, args: EvalArgs) -> None:
        self._lengths = args.needle or ()
        self._depths = args.needle_depths
        self._max_tokens = args.max_tokens

    def units(self, subject: Subject) -> list[Unit]:
        """Return a prompt of at most the wanted tokens for each length and depth."""
        most = self._max_tokens if subject.chats else _TEXT_OUTPUT
        return [
            Unit(
                f"{length} tokens, depth {depth}%",
                _prompt(subject, length, depth),
                greedy(most),
                partial(score, needle_number(length, depth)),
            )
            for length in self._lengths
            for depth in self._depths
        ]

    def figures(self, results: Mapping[str, Result]) -> Figures:
        """Return the share of numbers found, of all prompts and by length."""
        by_length = {}
        for length in self._lengths:
            found = [results[f"{length} tokens, depth {depth}%"] for depth in self._depths]
            by_length[str(length)] = {
                "recall": sum(one["found"] for one in found) / len(found),
                "prompts": len(found),
                "tokens": max(one["tokens"] for one in found),
            }
        return {
            "recall": sum(one["found"] for one in results.values()) / len(results),
            "by_length": by_length,
        }


def score(wanted: str, output: RequestOutput) -> Result:
    """Return whether the number is in the output as a whole number."""
    text = output.outputs[0].text
    return {
        "found": wanted in re.findall(r"\d+", text),
        "tokens": len(output.prompt_token_ids),
        "output": text,
    }


def needle_number(length: int, depth: int) -> str:
    """Return the number of a prompt, which each run draws alike."""
    return str(random.Random(f"number {length} {depth}").randrange(100_000, 1_000_000))


@cache
def _filler(count: int) -> tuple[str, ...]:
    """Return sentences without numbers."""
    rng = random.Random("filler")
    return tuple(
        f"The {rng.choice(_ADJECTIVES)} {rng.choice(_NOUNS)} {rng.choice(_VERBS)} the "
        f"{rng.choice(_ADJECTIVES)} {rng.choice(_THINGS)} {rng.choice(_TIMES)}."
        for _ in range(count)
    )


def _prompt(subject: Subject, length: int, depth: int) -> list[int]:
    """Return the longest prompt that has at most `length` tokens."""
    city = _CITIES[depth % len(_CITIES)]
    fact = f"The secret number of {city} is {needle_number(length, depth)}."

    def ids(count: int) -> list[int]:
        sentences = list(_filler(count))
        sentences.insert(round(count * depth / 100), fact)
        text = " ".join(sentences)
        if not subject.chats:
            return subject.text_ids(f"{text}\n\nThe secret number of {city} is")
        question = f"What is the secret number of {city}? Answer with the number alone."
        return subject.chat_ids([{"role": "user", "content": f"{text}\n\n{question}"}])

    if len(ids(0)) > length:
        raise ValidationError(
            "needle", f"{length} tokens are too few; the question alone has {len(ids(0))}"
        )
    fits, too_many = 0, length  # a sentence has more than one token
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if len(ids(middle)) <= length:
            fits = middle
        else:
            too_many = middle
    return ids(fits)
