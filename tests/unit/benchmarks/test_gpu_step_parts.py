"""The parts of a decode step, found in made-up traces."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest

from benchmarks.kernels.gpu_step_parts import PARTS, Kernel, beside_floors, part_times

Step = list[tuple[str, str]]
"""Names of kernels, each with the part that it belongs to."""

INPUTS = [
    ("Memcpy HtoD (Pinned -> Device)", "inputs"),
    ("_prepare", "inputs"),
    ("_plan", "inputs"),
    ("void at::native::(anonymous namespace)::vectorized_gather_kernel<16, int>(char*)", "inputs"),
    ("_rms_norm", "norms"),
]
SAMPLING = [
    ("_mask_logits", "sampling"),
    ("_score_tiles", "sampling"),
    ("_choose_tokens", "sampling"),
]
SUM = (
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>"
    "(cublasLt::cublasSplitKParams<float>)"
)
SPLIT = "nvjet_sm90_tst_128x8_64x12_2x1_v_bx_splitK_TNT"
WHOLE = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT"


def without_norms(layers: int) -> Step:
    """Return a step of one row: our own products begin and end the norms between them."""
    layer = [
        ("_gemv", "qkv"),
        ("_decode", "attention"),
        ("_gemv", "o"),
        ("_gemv", "gate_up"),
        ("_gemv", "down"),
    ]
    return [*INPUTS, *layer * layers, ("_gemv", "lm_head"), *SAMPLING]


def with_experts(layers: int) -> Step:
    """Return a step of a few rows of a model with experts."""
    layer = [
        ("_gemv", "qkv"),
        ("_decode", "attention"),
        ("_gemv", "o"),
        ("_rms_norm", "norms"),
        ("_router_product", "router"),
        ("_choose_experts", "router"),
        ("_expert_gate_up", "experts"),
        ("_expert_down", "experts"),
    ]
    return [*INPUTS, *layer * layers, ("_gemv", "lm_head"), *SAMPLING]


def with_codes(layers: int) -> Step:
    """Return a step of one row of a model with coded experts, which choose in their kernels."""
    layer = [
        ("_one_row_codes", "qkv"),
        ("_decode_few", "attention"),
        ("_one_row_codes", "o"),
        ("_router_rows", "router"),
        ("_register_gate_up", "experts"),
        ("_register_down", "experts"),
    ]
    return [*INPUTS, *layer * layers, ("_streamed", "lm_head"), *SAMPLING]


def with_one_kernel(layers: int) -> Step:
    """Return a step of one row of coded experts, which compute the next layer's QKV, too."""
    layer = [
        ("_few_rows", "attention"),
        ("_one_row_codes", "o"),
        ("_router_rows", "router"),
        ("expert_row", "experts"),
        ("_decode_few", "attention"),
        ("_sigmoid_mul", "attention"),
        ("_one_row_codes", "o"),
        ("_router_rows", "router"),
        ("expert_row", "experts"),
    ]
    first = ("_one_row_codes", "qkv")
    return [*INPUTS, first, *layer * layers, ("_gemv", "lm_head"), *SAMPLING]


def with_helpers(layers: int) -> Step:
    """Return a step of many rows: the library's products, with all their helper kernels."""
    layer = [
        (SPLIT, "qkv"),
        (SUM, "qkv"),
        ("_qkv_rope", "qkv"),
        ("_decode", "attention"),
        (SPLIT, "o"),
        (SUM, "o"),
        ("_rms_norm", "norms"),
        (WHOLE, "gate_up"),
        ("_silu_mul", "gate_up"),
        (SPLIT, "down"),
        (SUM, "down"),
        ("_rms_norm", "norms"),
    ]
    return [*INPUTS, *layer * layers, (SPLIT, "lm_head"), (SUM, "lm_head"), *SAMPLING]


def with_many_rows_of_codes(layers: int) -> Step:
    """Return a step of many rows of a model whose products have codes."""
    layer = [
        ("_wide_codes", "qkv"),
        ("_qkv_rope", "qkv"),
        ("decode_attention", "attention"),
        ("_wide_codes", "o"),
        ("_rms_norm", "norms"),
        ("coded_product", "gate_up"),
        ("coded_product", "down"),
        ("_rms_norm", "norms"),
    ]
    return [*INPUTS, *layer * layers, (WHOLE, "lm_head"), *SAMPLING]


def with_rounded_inputs(layers: int) -> Step:
    """Return a step of many rows whose products round their inputs, and whose cache has codes."""
    layer = [
        ("_wide_scaled", "qkv"),
        ("_qkv_rope", "qkv"),
        ("_decode_codes", "attention"),
        ("_quantize_rows", "o"),
        ("_scaled_product", "o"),
        ("_quantize_rows", "gate_up"),
        ("_wide_scaled", "gate_up"),
        ("_quantize_rows", "down"),
        ("_decode_words", "down"),
        (WHOLE, "down"),
        ("_quantize_rows", "qkv"),
    ]
    layer_last = [*layer[:-1], ("_quantize_rows", "lm_head"), ("_wide_scaled", "lm_head")]
    first = ("_quantize_rows", "qkv")
    return [*INPUTS, first, *layer * (layers - 1), *layer_last, *SAMPLING]


def mixed(layers: int) -> Step:
    """Return a step of a few rows.

    Some of the products are our own; a norm comes only after one that is not.
    """
    layer = [
        ("_skinny", "qkv"),
        ("_decode", "attention"),
        ("_skinny", "o"),
        ("_gated_gemm", "gate_up"),
        (SPLIT, "down"),
        (SUM, "down"),
        ("_rms_norm", "norms"),
    ]
    cutlass = (
        "void cutlass::Kernel2"
        "<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_32x6_tn_align8>(Params)"
    )
    return [*INPUTS, *layer * layers, (cutlass, "lm_head"), *SAMPLING]


def traced(steps: list[Step], early: float = 0.0) -> tuple[list[Kernel], dict[str, float]]:
    """Return a trace, and the times of the parts in a step.

    The kernels end 1, 2, 3... after the one before, and each starts `early` before that one's end.
    The times leave out the first step.
    """
    kernels, now, lasts = list[Kernel](), 100.0, count(1)
    times = dict.fromkeys(PARTS, 0.0)
    for number, step in enumerate(steps):
        for (name, part), lasting in zip(step, lasts, strict=False):
            kernels.append(Kernel(name, now - early, now + lasting))
            now += lasting
            times[part] += lasting / (len(steps) - 1) if number else 0
    return kernels, times


@pytest.mark.parametrize(
    "make",
    [
        without_norms,
        with_experts,
        with_codes,
        with_one_kernel,
        with_helpers,
        with_many_rows_of_codes,
        with_rounded_inputs,
        mixed,
    ],
)
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("early", [0.0, 0.75])
def test_each_part_has_its_kernels(make: Callable[[int], Step], layers: int, early: float) -> None:
    kernels, times = traced([make(layers)] * 3, early)
    assert part_times(reversed(kernels)) == pytest.approx(times)


def test_times_add_up_to_the_steps() -> None:
    """Include gaps and overlaps, from the end of the first step to the end of the last."""
    names = [name for name, _ in with_helpers(2)] * 4
    kernels = [
        Kernel(name, 10.0 * i + i % 3, 10.0 * i + 14 - i % 5) for i, name in enumerate(names)
    ]
    first, last = kernels[len(names) // 4 - 1], max(kernel.end for kernel in kernels)
    assert sum(part_times(kernels).values()) == pytest.approx((last - first.end) / 3)


def test_a_kernel_that_ends_within_another_takes_nothing() -> None:
    kernels, _ = traced([without_norms(1)] * 2)
    alone = part_times(kernels)
    at = next(i for i in range(len(kernels) - 1, 0, -1) if kernels[i].name == "_decode")
    kernels.insert(
        at + 1, Kernel("Memset (Device)", kernels[at].start + 0.1, kernels[at].end - 0.1)
    )
    assert part_times(kernels) == pytest.approx(alone)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("_decode", "_gemv follows qkv"),
        ("_gemv", "_decode follows inputs"),
        ("_mask_logits", "ends with lm_head"),
        ("_prepare", "0 kernels _prepare"),
    ],
)
def test_other_kernels_than_a_decode_step_are_refused(missing: str, message: str) -> None:
    kernels, _ = traced([without_norms(2)] * 2)
    with pytest.raises(ValueError, match=message):
        part_times(kernel for kernel in kernels if kernel.name != missing)


@pytest.mark.parametrize("product", range(9))
def test_a_lost_product_is_noticed(product: int) -> None:
    """Notice a lost product: all products behind it would be taken for their neighbours."""
    step = without_norms(2)
    step.pop([i for i, (name, _) in enumerate(step) if name == "_gemv"][product])
    with pytest.raises(ValueError, match=r"follows|ends with"):
        part_times(traced([step] * 2)[0])


def test_what_is_left_is_named() -> None:
    times = {"qkv": 12.0, "attention": 30.5, "norms": 4.0}
    *_, norms, left = beside_floors(times, {"qkv": 10.0, "attention": 20.0}, 45.0)
    assert norms.split() == ["norms", "4.0", "4.0"]
    assert left.strip() == (
        "left between the floors, 30.0, and the step, 45.0: 15.0 = "
        "attention 10.5, norms 4.0, qkv 2.0, outside the trace -1.5"
    )
