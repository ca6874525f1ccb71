"""Launches of the kernels of experts, for compile_kernels.py."""

from __future__ import annotations

from sidestep.kernels.experts import choices_triton, experts_triton, routing_triton
from sidestep.kernels.experts.common.expert_matrix import ExpertMatrix
from sidestep.kernels.experts.common.experts_config import CodedConfigs
from sidestep.kernels.experts.expert_codes import ExpertCodes
from sidestep.kernels.ops.rms_norm import BegunNorm, RmsNorm, Stream
from sidestep.kernels.ops.routing import Choice, Joined
from tests.triton.compiling.compile_quantized import MAIN_FORMS, coded
from tests.triton.compiling.meta_tensors import TOKENS, bf16, f32, u8


def launch_experts(*_: object) -> None:
    """Launch the experts of Qwen3-30B-A3B, Mixtral and DeepSeek-V3: few pairs, and sorted ones."""
    grouped = Choice(8, sigmoid=True, normalised=True, scale=2.5, groups=8, chosen_groups=4)
    for hidden, inner, experts, choice in (
        (2048, 768, 128, Choice(8, normalised=True)),
        (4096, 14336, 8, Choice(2, normalised=True)),
        (7168, 2048, 256, grouped),
    ):
        gate_up = ExpertMatrix(bf16(experts, 2 * inner, hidden))
        down = ExpertMatrix(bf16(experts, hidden, inner))
        bias = f32(experts) if choice.sigmoid else None
        for rows, gelu in ((1, False), (1, True), (256, False), (TOKENS, False), (TOKENS, True)):
            x, weight = bf16(rows, hidden), bf16(experts, hidden)
            routed = routing_triton.route(x, weight, bias, choice)
            for add in (False, True):
                experts_triton.multiply_experts(
                    x, routed, gate_up, down, bf16(rows, hidden), add=add, gelu=gelu
                )
        stream = Stream(
            bf16(8, hidden), RmsNorm(f32(hidden), 1e-6), BegunNorm(bf16(8, hidden), f32(8, 32))
        )
        undecided = routing_triton.route_stream(
            stream, bf16(experts + 1, hidden), bias, choice, joined=Joined(gated=True)
        )[1]
        choices_triton.decided(undecided)
        few = Stream(
            bf16(1, hidden), RmsNorm(bf16(hidden), 1e-6), BegunNorm(bf16(1, hidden), f32(1, 512))
        )
        routing_triton.route_stream(few, bf16(experts, hidden), bias, choice)
        many, weight = Stream(bf16(512, hidden), RmsNorm(bf16(hidden), 1e-6)), bf16(experts, hidden)
        then = experts_triton.read_first(many.hidden, choice.num_chosen, gate_up, down, experts)
        routing_triton.route_stream(many, weight, bias, choice, then=then)
        half = experts // 2
        for rows in (1, TOKENS):
            x, weight = bf16(rows, hidden), bf16(experts, hidden)
            routed = routing_triton.route(x, weight, bias, choice, range(half, experts))
            experts_triton.multiply_experts(
                x,
                routed,
                ExpertMatrix(gate_up.values[half:]),
                ExpertMatrix(down.values[half:]),
                bf16(rows, hidden),
                add=False,
                some=True,
            )
    launch_joined()
    launch_gpt_oss()
    launch_coded_experts()


def launch_joined() -> None:
    """Launch the experts of Qwen3.5-35B-A3B, with the shared one behind them."""
    hidden, inner, experts = 2048, 512, 256
    gate_up = ExpertMatrix(bf16(experts + 1, 2 * inner, hidden))
    down = ExpertMatrix(bf16(experts + 1, hidden, inner))
    for rows in (1, 8):
        x, weight = bf16(rows, hidden), bf16(experts + 1, hidden)
        choice, joined = Choice(8, normalised=True), Joined(gated=True)
        routed = routing_triton.route(x, weight, None, choice, joined=joined)
        experts_triton.multiply_experts(x, routed, gate_up, down, bf16(rows, hidden), add=True)


def launch_gpt_oss() -> None:
    """Launch the experts of gpt-oss, packed or not, on the first rank of two and on the other."""
    hidden, inner, experts = 2880, 1440, 32
    biases = bf16(experts, 2 * inner), bf16(experts, hidden)
    dense = (
        ExpertMatrix(bf16(experts, 2 * inner, hidden), biases[0]),
        ExpertMatrix(bf16(experts, hidden, inner), biases[1]),
    )
    packed = (
        ExpertCodes.of_mxfp4(
            ExpertMatrix(u8(2 * inner, hidden // 2), bf16(2 * inner), u8(2 * inner, hidden // 32))
        ).room_for(experts),
        ExpertCodes.of_mxfp4(
            ExpertMatrix(u8(hidden, inner // 2), None, u8(hidden, inner // 32))
        ).room_for(experts),
    )
    for rows in (1, 8, 256, TOKENS):
        x = bf16(rows, hidden)
        routed = routing_triton.route(
            x,
            bf16(experts, hidden),
            None,
            Choice(4, normalised=True),
            product_bias=f32(experts),
        )
        for gate_up, down in (dense, packed):
            experts_triton.multiply_experts(
                x, routed, gate_up, down, bf16(rows, hidden), add=True, clamped=(1.702, 7.0)
            )


def launch_coded_experts() -> None:
    """Launch the experts of Qwen3-30B-A3B with quantized matrices."""
    hidden, inner, experts = 2048, 768, 128
    for form in MAIN_FORMS:
        gate_up, down = (
            ExpertCodes.of(coded(form, *size)).room_for(experts)
            for size in ((2 * inner, hidden), (hidden, inner))
        )
        for rows in (1, 8, 256, TOKENS):
            x = bf16(rows, hidden)
            choice = Choice(8, normalised=True)
            routed = routing_triton.route(x, bf16(experts, hidden), None, choice)
            configs = (None, CodedConfigs()) if rows == 8 else (None,)
            for chosen in configs:
                experts_triton.multiply_experts(
                    x, routed, gate_up, down, bf16(rows, hidden), add=True, configs=chosen
                )
