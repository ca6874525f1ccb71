"""The step that takes most memory, which is run once before the KV cache gets the rest."""

from __future__ import annotations

import numpy as np

from sidestep.ipc.config_sections import StepLimits
from sidestep.ipc.params.logits_controls import Controls, encode_controls
from sidestep.ipc.params.ranges import MAX_LOGPROBS
from sidestep.ipc.transport.step import StepInput

ALL_CONTROLS = Controls(
    logit_bias={0: 1.0},
    allowed_token_ids=[0, 1],
    bad_words=[[0, 1]],
    logprobs=MAX_LOGPROBS,
    prompt_logprobs=MAX_LOGPROBS,
)
"""Controls that take memory while a step runs. The counts of penalties are not among them: they
stay from step to step, and grow with the number of requests that ask for penalties."""


def largest_step(
    limits: StepLimits, max_model_len: int, block_size: int, controls: Controls
) -> StepInput:
    """Return a step with as many rows and tokens as any step may have.

    All rows are new requests with these controls, and all their blocks are block 0.
    """
    rows = limits.max_num_seqs
    counts = np.ones(rows, np.int32)
    left = limits.max_num_batched_tokens - rows
    for row in range(rows - 1, -1, -1):
        more = min(left, max_model_len - 1)
        counts[row] += more
        left -= more
    blocks = -(-counts // block_size)
    asked = encode_controls(controls)
    zeros, slots = np.zeros(rows, np.int32), np.arange(rows, dtype=np.int32)
    return StepInput(
        step_id=0,
        slots=slots,
        num_tokens=counts,
        num_new_blocks=blocks,
        block_ids=np.zeros(blocks.sum(), np.int32),
        new_slots=slots,
        new_num_known=counts,
        new_num_prompt=counts,
        new_num_computed=zeros,
        new_num_sent=counts,
        new_token_ids=np.zeros(counts.sum(), np.int32),
        new_temperature=np.ones(rows, np.float32),
        new_top_p=np.full(rows, 0.9, np.float32),
        new_min_p=np.zeros(rows, np.float32),
        new_top_k=zeros + 5,
        new_seed=np.zeros(rows, np.int64),
        new_min_tokens=zeros,
        new_num_stop_ids=zeros,
        new_stop_ids=np.empty(0, np.int32),
        new_control_sizes=zeros + len(asked),
        new_controls=np.frombuffer(asked * rows, np.uint8),
    )
