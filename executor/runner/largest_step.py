"""The step that takes most memory, which is run once before the KV cache gets the rest."""

from __future__ import annotations

import numpy as np

from sidestep.ipc.params.logits_controls import Controls, encode_controls
from sidestep.ipc.params.ranges import MAX_LOGPROBS
from sidestep.ipc.step_limits import StepLimits
from sidestep.ipc.transport.slot_columns import empty_tables
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
    slots = np.arange(rows, dtype=np.int32)
    entering = empty_tables(rows)
    for name, values in {
        "slot": slots,
        "num_known": counts,
        "num_prompt": counts,
        "num_sent": counts,
        "max_total": max_model_len,
        "num_control_bytes": len(asked),
        "temperature": 1,
        "top_p": 0.9,
        "top_k": 5,
    }.items():
        entering[name] = values
    return StepInput(
        step_id=0,
        slots=slots,
        num_tokens=counts,
        num_new_blocks=blocks,
        block_ids=np.zeros(blocks.sum(), np.int32),
        entering=entering,
        new_token_ids=np.zeros(counts.sum(), np.int32),
        new_stop_ids=np.empty(0, np.int32),
        new_controls=np.frombuffer(asked * rows, np.uint8),
    )
