"""The sizes of steps: limits that all processes of a replica share, and their defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sidestep.ipc.model.layer_spec import LayerSpec, experts_of

_LIMITS, _GPU_LIMITS = (256, 2048), (512, 33 * 256)
"""Default max_num_seqs and max_num_batched_tokens.

On a GPU the tokens are 33 tiles of 256. The tiles of a large product are then most often a multiple
of the 132 processors of an H100 or H200, and none of those waits in the last turn.
"""
_EXPERTS_TOKENS = 2 * _GPU_LIMITS[1]
"""Default max_num_batched_tokens on a GPU of a model with experts.

The tokens of a step are shared out among the experts, and each must have many to fill its tiles.
"""


def default_limits(device: str, layers: Sequence[LayerSpec]) -> tuple[int, int]:
    """Return the default max_num_seqs and max_num_batched_tokens for a model's layers.

    device: 'cuda', 'cpu' or 'fake'.
    """
    if device != "cuda":
        return _LIMITS
    return _GPU_LIMITS[0], _EXPERTS_TOKENS if experts_of(layers) else _GPU_LIMITS[1]


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """The largest sizes of steps and tables, and the most steps at once."""

    max_num_seqs: int
    """Most rows of one step."""
    max_num_batched_tokens: int
    """Most tokens of one step."""
    num_slots: int
    """Rows of a worker's tables."""
    target_itl_s: float
    """Seconds that a step with decodes should last at most; 0 for any.

    The bound holds as far as the prompts that wait permit. In a pipeline it is a stage's part.
    """
    num_stages: int
    """Stages of the pipeline.

    The first stage knows a token when this many further steps have begun.
    """
    max_steps_in_flight: int
    """Most steps in flight: each stage has one; with overlap, one more is queued."""
    num_drafts: int = 0
    """Most drafts of a row in a step; 0 without speculation."""

    @property
    def num_masks(self) -> int:
        """Grammar masks that a worker keeps: the masks of some grammars, and of any two steps."""
        return max(1024, 2 * self.max_num_seqs * (1 + self.num_drafts))

    @property
    def most_states(self) -> int:
        """Most states of recurrent layers that are of use.

        There is one for each request that may run at once, as many checkpoints, and one more, since
        a request may begin from a checkpoint.
        """
        return 2 * self.max_num_seqs + 1

    @property
    def state_width(self) -> int:
        """Rows of memory of a state: one for each token that a step may accept."""
        return 1 + self.num_drafts

    @property
    def max_tokens_ahead(self) -> int:
        """Most tokens from the first that a request may still compute to the end of its next row.

        Drafts of steps in flight may be rejected, and are then computed again.
        """
        return self.max_num_batched_tokens + self.max_steps_in_flight * (1 + self.num_drafts)
