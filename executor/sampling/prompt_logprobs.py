"""Log-probabilities of a prompt's own tokens.

The logits of one token give those of the next token. So in a step that computes a chunk of such a
prompt, the last layer goes on with all of the chunk's tokens, not only with those that sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sidestep.executor.models.decoder import DecoderForCausalLM
from sidestep.executor.runner.input_batch import HostBatch
from sidestep.executor.runner.transfer import to_device
from sidestep.executor.sampling.token_logprobs import (
    MOST_TOKENS,
    Logprobs,
    logprobs_of,
    make_logprobs,
)
from sidestep.ipc.transport.step import Int32, Int64
from sidestep.kernels.ops.rms_norm import Stream


@dataclass(frozen=True, kw_only=True)
class PromptTokens:
    """Tokens of a step that have a next one in their prompt; n of them."""

    tokens: Int64
    """[n] Indices among the tokens of the step."""
    rows: Int64
    """[n] Indices among the rows of the step."""
    positions: Int64
    """[n] Position of the next token in its prompt."""
    next_ids: Int64
    """[n] The next token."""
    numbers: Int32
    """[n] Numbers of most probable tokens that are asked for."""


def find_prompt_tokens(batch: HostBatch, numbers: Int32) -> PromptTokens | None:
    """Return the tokens of prompts whose log-probabilities are asked for; None if there is none.

    numbers: by slot, how many most probable tokens are asked for; -1 where none.
    """
    if not (numbers[batch.slots] >= 0).any():
        return None
    wanted = numbers[batch.row_slots] >= 0
    tokens = np.flatnonzero(
        wanted & (batch.positions + 1 < batch.state.num_prompt[batch.row_slots])
    )
    if not len(tokens):
        return None
    slots, positions = batch.row_slots[tokens], batch.positions[tokens] + 1
    rows = np.searchsorted(batch.query_starts, tokens, side="right") - 1
    return PromptTokens(
        tokens=tokens,
        rows=rows,
        positions=positions,
        numbers=numbers[slots],
        next_ids=batch.state.token_ids[slots, positions].astype(np.int64),
    )


def with_prompt_tokens(rows: Tensor, prompts: PromptTokens) -> Tensor:
    """Return the tokens that the last layer must go on with.

    They are `rows`, int [R] on the device, and then the prompts' tokens.
    """
    return torch.cat((rows, to_device(prompts.tokens, rows.device).to(rows.dtype)))


def prompt_logprobs(
    model: DecoderForCausalLM, stream: Stream, first: int, prompts: PromptTokens
) -> list[Logprobs]:
    """Return the log-probabilities of the prompts' tokens.

    stream: the model's last layer's output, where the prompts' tokens begin at row `first`. Logits
    are made for a few tokens at a time: those of a whole prompt would take gigabytes.
    """
    most, next_ids = int(prompts.numbers.max()), to_device(prompts.next_ids, stream.hidden.device)
    packed = []
    for begin in range(0, len(prompts.tokens), MOST_TOKENS):
        end = min(begin + MOST_TOKENS, len(prompts.tokens))
        packed.append(
            logprobs_of(
                model.logits(stream.part(first + begin, first + end)), next_ids[begin:end], most
            )
        )
    return [make_logprobs(torch.cat(packed), prompts.rows, prompts.positions, prompts.numbers)]
