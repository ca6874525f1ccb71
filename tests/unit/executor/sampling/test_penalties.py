"""Counts of tokens on the device while requests enter, leave and enter again."""

from __future__ import annotations

import random

import numpy as np
import torch

from sidestep.executor.sampling.logits_processor import EnteringRequest, ProcessorSetup, Slots
from sidestep.executor.sampling.penalties import Penalties
from sidestep.executor.sampling.token_masks import BadWords
from sidestep.ipc.params.logits_controls import Controls
from sidestep.ipc.params.sampling_params import SamplingParams
from tests.e2e.output.control import controlled

VOCAB, SLOTS = 23, 40


def entering(
    slot: int, controls: Controls, prompt: list[int], output: list[int]
) -> EnteringRequest:
    return EnteringRequest(
        slot=slot,
        controls=controls,
        prompt_token_ids=np.array(prompt, np.int32),
        output_token_ids=np.array(output, np.int32),
    )


def of(slots: list[int]) -> Slots:
    return Slots.of(slots, torch.tensor(slots))


def setup() -> ProcessorSetup:
    return ProcessorSetup(device=torch.device("cpu"), vocab_size=VOCAB, num_slots=SLOTS)


def test_random_requests_in_random_slots() -> None:
    """Compare with plain arithmetic over each request's tokens.

    Many requests enter with output, as after a preemption.
    """
    rng, penalties = random.Random(5), Penalties(setup())
    live: dict[int, tuple[SamplingParams, list[int], list[int]]] = {}
    for _ in range(300):
        slot = rng.randrange(SLOTS)
        if rng.random() < 0.3:
            if slot in live:
                penalties.leave(slot)
                del live[slot]
            params = SamplingParams(
                presence_penalty=rng.choice([0, 0.5]),
                frequency_penalty=rng.choice([0, 0.25, -1]),
                repetition_penalty=rng.choice([1.0, 1.5, 0.5]),
            )
            prompt, output = (
                [rng.randrange(VOCAB) for _ in range(rng.randint(1 - i, 9))] for i in range(2)
            )
            controls = Controls(
                presence_penalty=params.presence_penalty,
                frequency_penalty=params.frequency_penalty,
                repetition_penalty=params.repetition_penalty,
            )
            if penalties.enter(entering(slot, controls, prompt, output)):
                live[slot] = (params, prompt, output)
            else:
                assert controls == Controls()
        slots = rng.sample(sorted(live), min(len(live), rng.randint(1, 12)))
        if not slots:
            continue
        logits = torch.randn(len(slots), VOCAB)
        expected = [
            controlled(row, live[slot][1], live[slot][2], live[slot][0])
            for row, slot in zip(logits, slots, strict=True)
        ]
        penalties.apply(logits, of(slots))
        torch.testing.assert_close(logits, torch.stack(expected))
        tokens = [rng.randrange(VOCAB) for _ in slots]
        penalties.sampled(torch.tensor(tokens), of(slots))
        for slot, token in zip(slots, tokens, strict=True):
            live[slot][2].append(token)
    assert len(live) > 10


def test_the_last_token_of_a_bad_word_is_masked_after_the_others_only() -> None:
    rng = random.Random(6)
    for _ in range(30):
        processor = BadWords(setup())
        words = {
            slot: [[rng.randrange(3) for _ in range(rng.randint(1, 4))] for _ in range(3)]
            for slot in (4, 9)
        }
        outputs = {slot: [rng.randrange(3) for _ in range(rng.randint(0, 5))] for slot in words}
        for slot, bad in words.items():
            assert processor.enter(
                entering(slot, Controls(bad_words=bad), [0, 1, 2, 1, 0], outputs[slot])
            )
        for _ in range(12):
            logits = torch.zeros(2, VOCAB)
            processor.apply(logits, of([4, 9]))
            for row, slot in zip(logits, (4, 9), strict=True):
                masked = {
                    word[-1]
                    for word in words[slot]
                    if outputs[slot][len(outputs[slot]) - len(word) + 1 :] == word[:-1]
                    or len(word) == 1
                }
                assert set(torch.isinf(row).nonzero().flatten().tolist()) == masked
            tokens = [rng.randrange(3), rng.randrange(3)]
            processor.sampled(torch.tensor(tokens), of([4, 9]))
            for slot, token in zip((4, 9), tokens, strict=True):
                outputs[slot].append(token)
