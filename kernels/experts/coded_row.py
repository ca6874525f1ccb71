"""Both products of coded experts for one row, in one kernel of a Hopper GPU.

The kernel is kernels/cuda/source/expert_row.cu. Reading the experts' matrices takes the time, and
does not stop between the two products. A row has the bits that coded_few_gluon.py computes.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from sidestep.kernels.cuda.compiler import compiles, cubin
from sidestep.kernels.cuda.launcher import Kernel, Kernels, runs_or_compiles
from sidestep.kernels.experts.choices_triton import decided
from sidestep.kernels.experts.common.choice_triton import by_softmax_of_all
from sidestep.kernels.experts.common.cuda_options import Activation
from sidestep.kernels.experts.common.experts_config import RegisterConfigs
from sidestep.kernels.experts.common.product_behind import ProductBehind
from sidestep.kernels.experts.expert_codes import ExpertCodes
from sidestep.kernels.experts.row_form import (
    NOTHING_BEHIND,
    OUTPUTS,
    Behind,
    Choosing,
    Ending,
    Form,
    Matrix,
)
from sidestep.kernels.gpu import is_hopper
from sidestep.kernels.launch import next_power_of_2, num_processors
from sidestep.kernels.ops.rms_norm import BegunNorm, DoneProduct, RmsNorm, room_to_begin
from sidestep.kernels.ops.routing import TINY, Routed, Undecided
from sidestep.kernels.products.coded_linear import choose
from sidestep.kernels.products.streamed_config import OneRowConfig

_GATE_SHARES = 4
"""Shares of the columns of gate and up, each of which is added by itself."""
_MOST_CHOSEN, _MOST_EXPERTS = 16, 512
"""Experts of a token, and those that a warp chooses among."""


class _Operands(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_void_p)
        for name in (
            "x",
            "gate_up",
            "down",
            "gate_up_scales",
            "down_scales",
            "gate_up_bias",
            "down_bias",
            "ids",
            "weights",
            "parts",
            "logit_bias",
            "out",
            "next_norm",
            "next_weighted",
            "next_squares",
            "exchanged",
            "counter",
            "behind",
            "behind_scales",
            "behind_out",
        )
    )


class _Factors(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_float) for name in ("scale", "tiny", "eps"))


@functools.cache
def _places(device: torch.device, size: int) -> tuple[Tensor, Tensor]:
    """Return two places of `size` bytes for what blocks exchange, and the counter of launches.

    They are as exchange.cuh needs them, and launches leave them so.
    """
    places = torch.full((2, size), 255, dtype=torch.uint8, device=device)
    return places, torch.zeros(1, dtype=torch.int32, device=device)


def compiled(form: Form) -> Path:
    """Return the file of the machine code for this form."""
    return cubin("expert_row", form.options, {})


def _kernel(file: Path, form: Form) -> Kernel:
    return Kernel(file, "expert_row", threads=form.threads, shared=form.shared)


_KERNELS = Kernels(compiled, _kernel)


def takes_row(
    x: Tensor,
    routed: Routed | Undecided,
    gate_up: ExpertCodes,
    down: ExpertCodes,
    configs: RegisterConfigs,
) -> bool:
    """Return whether the kernel multiplies these rows: one, on a Hopper GPU.

    configs: those by which the other kernels would add the row's numbers.
    """
    if len(x) > 1 or not (is_hopper(x.device) and runs_or_compiles(x) and compiles()):
        return False
    codings, whole = (gate_up.coding, down.coding), x.shape[1] % 8 == gate_up.num_rows % 16 == 0
    same = len({(coding.kind, coding.zeros) for coding in codings}) == 1
    simple = all(coding.height == 1 or coding.height % 8 == 0 for coding in codings)
    if not (whole and same and simple and configs.gate_up.warps == _GATE_SHARES):
        return False
    form = _form(x, routed, gate_up, down, configs, (False, None, None), Ending(True, True, True))
    return routed.chosen <= _MOST_CHOSEN and form.fits


def _matrix(columns: int, codes: ExpertCodes) -> Matrix:
    """Return the form of matrices with as many columns."""
    return Matrix(columns, codes.coding.width, codes.coding.height, codes.bias is not None)


def _chooses(undecided: Undecided) -> bool:
    """Return whether the kernel chooses these experts."""
    return undecided.experts <= _MOST_EXPERTS and by_softmax_of_all(undecided)


def _choosing(routed: Routed | Undecided) -> Choosing:
    if isinstance(routed, Routed):
        return Choosing()
    (parts, _, wide), joined = routed.parts.shape, routed.joined
    normalised, gated = routed.choice.normalised, joined is not None and joined.gated
    return Choosing(parts, wide, routed.experts, normalised, joined is not None, gated)


def _behind(x: Tensor, gate_up: ExpertCodes, product: ProductBehind) -> Behind:
    """Return the form of the product behind, or that of none if the kernel does not compute it."""
    coding, matrix = gate_up.coding, product.matrix
    config = choose(len(x), matrix, gated=False)
    alike = (matrix.kind, matrix.zeros, matrix.dtype) == (coding.kind, coding.zeros, x.dtype)
    (rows, columns), (height, group) = matrix.shape, matrix.group
    whole = rows % OUTPUTS == 0 and (height == 1 or height % OUTPUTS == 0)
    if not (isinstance(config, OneRowConfig) and alike and whole and columns == x.shape[1]):
        return NOTHING_BEHIND
    return Behind(rows, group, height, config.split, product.crowded)


def _form(
    x: Tensor,
    routed: Routed | Undecided,
    gate_up: ExpertCodes,
    down: ExpertCodes,
    configs: RegisterConfigs,
    activation: Activation,
    ending: Ending,
) -> Form:
    """Return the form of the kernel for these operands."""
    return Form(
        x.dtype,
        gate_up.coding.kind,
        gate_up.coding.zeros,
        routed.chosen,
        _matrix(x.shape[1], gate_up),
        _matrix(gate_up.num_rows // 2, down),
        shares=max(1, configs.down.warps // next_power_of_2(routed.chosen)),
        blocks=num_processors(x.device),
        activation=activation,
        choosing=_choosing(routed),
        ending=ending,
    )


def multiply_row(
    x: Tensor,
    routed: Routed | Undecided,
    out: Tensor,
    gate_up: ExpertCodes,
    down: ExpertCodes,
    activation: Activation,
    configs: RegisterConfigs,
    *,
    add: bool,
    norm: RmsNorm | None = None,
    behind: ProductBehind | None = None,
) -> BegunNorm | DoneProduct | None:
    """Write or add what multiply_experts does, for x [1, D]. activation, behind: as there.

    Experts that are not chosen yet are chosen by the kernel where it can, else before it.
    """
    if isinstance(routed, Undecided) and not _chooses(routed):
        routed = decided(routed)
    begins = norm is not None and norm.may_begin
    wide_norm = begins and norm is not None and norm.weight.dtype == torch.float32
    ending = Ending(add, begins, wide_norm)
    form = _form(x, routed, gate_up, down, configs, activation, ending)
    if begins and behind is not None:
        with_product = replace(form, behind=_behind(x, gate_up, behind))
        form = with_product if with_product.fits else form
    begun: BegunNorm | DoneProduct | None = None
    after: tuple[Tensor | None, ...] = (None, None, None)
    if behind is not None and form.behind.rows:
        begun = DoneProduct(out.new_empty(1, form.behind.rows), behind.matrix.words)
        after = (begun.codes, behind.matrix.scales, begun.product)
    else:
        begun = room_to_begin(norm, out, x.shape[1] // OUTPUTS)
    kernel = _KERNELS.to_launch(form, x)
    if kernel is None:
        return begun
    ids, weights = routed if isinstance(routed, Routed) else (None, None)
    parts, bias, scale = None, None, 1.0
    if isinstance(routed, Undecided):
        parts, bias, scale = routed.parts, routed.product_bias, routed.choice.scale
    tensors = (
        x,
        gate_up.words,
        down.words,
        gate_up.scales,
        down.scales,
        gate_up.bias,
        down.bias,
        ids,
        weights,
        parts,
        bias,
        out,
        None if norm is None else norm.weight,
        *(begun if isinstance(begun, BegunNorm) else (None, None)),
        *_places(x.device, form.exchanged),
        *after,
    )
    addresses = (None if one is None else one.data_ptr() for one in tensors)
    eps = 0.0 if norm is None else norm.eps
    kernel.launch(form.blocks, [_Operands(*addresses), _Factors(scale, TINY, eps)])
    return begun
