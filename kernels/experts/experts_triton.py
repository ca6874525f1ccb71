"""The products of a mixture of experts in Triton.

A pair is a token and one of its experts. For a few pairs, each is multiplied by itself
(few_pairs_triton.py). For more, they are sorted by expert (grouped_pairs_triton.py).

With expert parallelism, the pairs of other ranks' experts have negative ids. They are not sorted,
read no matrix, and count as zero.

No value is added atomically: each sum has one order, whatever else is in the step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sidestep.kernels.experts.expert_matrix import ExpertMatrix
from sidestep.kernels.experts.experts_config import (
    FewConfigs,
    SortedConfigs,
    few_configs,
    sorted_configs,
)
from sidestep.kernels.experts.few_pairs_triton import multiply_few
from sidestep.kernels.experts.grouped_pairs_triton import multiply_sorted
from sidestep.kernels.ops.rms_norm import BegunNorm, RmsNorm
from sidestep.kernels.ops.routing import Routed


def few_pairs(rows: int, chosen: int, num_experts: int) -> bool:
    """Return whether each pair is multiplied by itself.

    Then no more matrices are read than there are, and nothing has to be sorted.
    """
    return rows * chosen <= num_experts


def multiply_experts(
    x: Tensor,
    routed: Routed,
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    out: Tensor,
    *,
    add: bool,
    gelu: bool = False,
    clamped: tuple[float, float] | None = None,
    few: bool | None = None,
    some: bool = False,
    norm: RmsNorm | None = None,
    configs: FewConfigs | SortedConfigs | None = None,
) -> BegunNorm | None:
    """Write the weighted sum of each token's experts to out [T, D], or add it.

    x [T, D]; gate_up [E, 2 F, D], the gate's rows first; down [E, D, F]; all contiguous, and of one
    type where they are not coded. clamped: alpha and limit of clamped_swiglu, if that is the
    activation. few: whether each pair is multiplied by itself; None for the usual choice. some:
    whether pairs may have negative ids, which add nothing. norm: the norm that the result goes
    through next. configs: None for the usual ones. Return the part of that norm that was computed
    on the way, or None. As of other products, it is not begun in float16.
    """
    if len(x) == 0:
        return None
    (rows, chosen), experts = routed.ids.shape, len(down.values)
    if configs is None:
        if few_pairs(rows, chosen, experts) if few is None else few:
            configs = few_configs(down)
        else:
            configs = sorted_configs(rows * chosen, experts)
    alpha, limit = clamped or (None, None)
    operands = x, routed, gate_up, down, out, (gelu, alpha, limit)
    if isinstance(configs, FewConfigs):
        begun = norm if x.dtype == torch.bfloat16 else None
        return multiply_few(*operands, configs, add=add, some=some, norm=begun)
    multiply_sorted(*operands, configs, add=add, some=some)
    return None
