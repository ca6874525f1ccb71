"""Parts of a decode step that the kernels of a trace belong to, and their times beside floors.

A trace has names only, and one name serves several products. So products are distinguished by their
order: between the attention of one layer and that of the next come o, gate_up, down and qkv. The
kernels between them, which depend on the number of rows, have names of their own. Nothing here
needs a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

PARTS = (
    *("inputs", "qkv", "attention", "o", "gate_up", "down", "router", "experts"),
    *("norms", "lm_head", "sampling"),
)
"""Parts of a step.

Inputs are the kernels before the first layer, with the gap behind the step before. A product is
counted with the kernels that belong to it: qkv with norms of heads and the rotary embedding where
these are a kernel, gate_up with its activation, and all with the sums of the library's split
products and the kernels that round their inputs or decode their weights. A kernel of one row's
experts may compute the next layer's QKV, and counts as experts. Recurrent layers count as
attention.
"""

_FIRST = "_prepare"
_ATTENTION = ("_decode", "_decode_codes", "_decode_few", "_few_rows", "decode_attention")
_ONE_ROW = "expert_row"
_NORM = "_rms_norm"
_SAMPLING = "_mask_logits"
_NEXT_PRODUCT = {
    "inputs": "qkv",
    "attention": "o",
    "o": "gate_up",
    "gate_up": "down",
    "down": "qkv",
    "experts": "qkv",
}
_OF_EXPERTS = {
    "_router_product": "router",
    "_router_rows": "router",
    "_router_tiles": "router",
    "_choose_experts": "router",
    "_count_pairs": "experts",
    "_place_pairs": "experts",
    "count_pairs": "experts",
    "place_pairs": "experts",
    "_expert_gate_up": "experts",
    "_expert_down": "experts",
    "_few_down": "experts",
    "_grouped_gate_up": "experts",
    "_grouped_down": "experts",
    "expert_products": "experts",
    "expert_stream": "experts",
    _ONE_ROW: "experts",
    "_coded_gate_up": "experts",
    "_coded_down": "experts",
    "_coded_sorted_down": "experts",
    "_register_gate_up": "experts",
    "_register_down": "experts",
    "_combine": "experts",
}
_PRODUCT = re.compile(
    r"_skinny|_streamed|_coded$|_one_row_codes|_wide_codes|_wide_scaled"
    r"|(coded|gated|_scaled)_product|nvjet|gemm|gemv|cutlass|xmma",
    re.IGNORECASE,
)
_OF_NEXT_PRODUCT = ("_quantize_rows", "_decode_words", "_decode_matrix")
_SUM = re.compile(r"reduce", re.IGNORECASE)


class Kernel(NamedTuple):
    """Kernel or copy, as the profiler saw it, in any unit of time."""

    name: str
    start: float
    end: float


def part_times(trace: Iterable[Kernel]) -> dict[str, float]:
    """Return the mean time of each part in all steps but the first.

    The first step only shows when the second begins. A kernel's time is that from the end of the
    kernel before it to its own end. So the times add up to the step, though kernels that are
    launched early overlap. A product that reads its weights while the kernel before it still runs
    may take less than its floor.

    Raises ValueError if the kernels are not those of decode steps.
    """
    kernels = sorted(trace, key=lambda kernel: kernel.start)
    ends = list(accumulate((kernel.end for kernel in kernels), max))
    starts = list(_step_starts(kernels))
    if len(starts) < 2:
        raise ValueError(
            f"the trace has {len(starts)} kernels {_FIRST}, one a step; "
            "two steps are needed at least"
        )
    times = dict.fromkeys(PARTS, 0.0)
    for begin, stop in pairwise([*starts[1:], len(kernels)]):
        parts = _parts([kernel.name for kernel in kernels[begin:stop]])
        for part, (before, end) in zip(parts, pairwise(ends[begin - 1 : stop]), strict=True):
            times[part] += (end - before) / (len(starts) - 1)
    return times


def _step_starts(kernels: Sequence[Kernel]) -> Iterator[int]:
    """Yield the index of each step's first event: the copy of its message, or its first kernel."""
    for i, kernel in enumerate(kernels):
        if kernel.name == _FIRST:
            yield i - 1 if i and kernels[i - 1].name.startswith("Memcpy") else i


def _is_product(name: str) -> bool:
    return _PRODUCT.search(name) is not None and _SUM.search(name) is None


def _parts(names: Sequence[str]) -> list[str]:
    """Return the part of each kernel of one step."""
    parts = list(_parts_so_far(names))
    for i in range(len(names) - 2, -1, -1):
        if names[i] in _OF_NEXT_PRODUCT:
            parts[i] = parts[i + 1]
    return parts


def _parts_so_far(names: Sequence[str]) -> Iterator[str]:
    """Yield the part of each kernel, or that of the kernel before where the name tells none."""
    last = max((i for i, name in enumerate(names) if _is_product(name)), default=-1)
    part = "inputs"
    for i, name in enumerate(names):
        if name == _NORM:
            # A norm may lie between two products or not: the order of products does not depend on
            # it.
            yield "norms"
            continue
        if name in _OF_EXPERTS:
            part = _after(part, ("o", "router", "experts"), _OF_EXPERTS[name], name)
        elif name in _ATTENTION:
            computed = "experts" if names[i - 1] == _ONE_ROW else "qkv"
            part = _after(part, ("qkv", computed), "attention", name)
        elif _is_product(name):
            product = (
                "lm_head"
                if i == last and part in ("down", "experts")
                else _NEXT_PRODUCT.get(part, "")
            )
            part = _after(part, _NEXT_PRODUCT, product, name)
        elif name == _SAMPLING:
            part = _after(part, ("lm_head",), "sampling", name)
        yield part
    if part != "sampling":
        raise ValueError(f"a step ends with {part}")


def _after(part: str, allowed: Iterable[str], following: str, name: str) -> str:
    if part not in allowed:
        raise ValueError(
            f"{name} follows {part}: not the kernels of a decode step as they are known here"
        )
    return following


def beside_floors(
    times: Mapping[str, float], floors: Mapping[str, float], step: float
) -> list[str]:
    """Return lines with each part beside its floor, and the time between all floors and the step.

    step: time as it was measured without the profiler.
    """
    over = {part: time - floors.get(part, 0.0) for part, time in times.items()}
    lines = ["    part         took     floor      over"]
    for part, time in times.items():
        floor = f"{floors[part]:9.1f}" if part in floors else f"{'':9}"
        lines.append(f"    {part:9}{time:9.1f} {floor} {over[part]:9.1f}")
    bound = sum(floors.values())
    over["outside the trace"] = step - sum(times.values())
    named = ", ".join(
        f"{part} {left:.1f}" for part, left in sorted(over.items(), key=lambda item: -item[1])
    )
    return [
        *lines,
        f"    left between the floors, {bound:.1f}, and the step, {step:.1f}: "
        f"{step - bound:.1f} = {named}",
    ]
