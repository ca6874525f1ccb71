"""A reference for the controls of logits, in plain steps over one row.

The engine's results must equal it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sidestep import SamplingParams


def controlled(
    logits: Tensor, prompt: Sequence[int], output: Sequence[int], params: SamplingParams
) -> Tensor:
    """Return the logits, float32 [V], after all changes that come before temperature."""
    logits = logits.clone()
    if params.allowed_token_ids:
        for token in set(range(len(logits))) - set(params.allowed_token_ids):
            logits[token] = -torch.inf
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    for token in {*prompt, *output}:
        penalty = params.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token in set(output):
        logits[token] -= (
            params.frequency_penalty * list(output).count(token) + params.presence_penalty
        )
    return logits


@torch.inference_mode()
def reference_greedy(
    model: PreTrainedModel, prompt: list[int], params: SamplingParams
) -> list[int]:
    """Return greedy tokens by transformers' logits with the controls applied."""
    assert params.max_tokens is not None
    output: list[int] = []
    for _ in range(params.max_tokens):
        logits = model(torch.tensor([prompt + output])).logits[0, -1].float()
        output.append(int(controlled(logits, prompt, output, params).argmax()))
    return output


@torch.inference_mode()
def reference_pairs(
    model: PreTrainedModel, prompt: list[int], params: SamplingParams
) -> dict[tuple[int, int], float]:
    """Return the probability of each pair of first tokens, among a few allowed tokens."""
    pairs = {}
    for first, p in _probabilities(model, prompt, [], params).items():
        for second, q in _probabilities(model, prompt, [first], params).items():
            pairs[first, second] = p * q
    return pairs


def _probabilities(
    model: PreTrainedModel, prompt: list[int], output: list[int], params: SamplingParams
) -> dict[int, float]:
    assert params.allowed_token_ids
    logits = model(torch.tensor([prompt + output])).logits[0, -1].float()
    logits = controlled(logits, prompt, output, params)
    probs = (logits if params.temperature_last else logits / params.temperature).softmax(-1)
    order = probs.argsort(descending=True)
    if params.top_k:
        probs[order[params.top_k :]] = 0
        probs /= probs.sum()
    if params.top_p < 1:
        before = probs[order].cumsum(0) - probs[order]
        probs[order[before >= params.top_p]] = 0
        probs /= probs.sum()
    if params.min_p:
        probs = torch.where(probs >= params.min_p * probs.max(), probs, 0.0)
        probs /= probs.sum()
    if params.temperature_last:
        probs = probs ** (1 / params.temperature)
        probs /= probs.sum()
    return {token: float(probs[token]) for token in params.allowed_token_ids}
