"""x W^T by our own kernels, for a few rows: the choice of one, and the features common to all.

A kernel is chosen if it is faster than the library. All can end in the gated activation, so that
the values between the halves of an MLP are never written, or in the addition to the residual
stream.

The norm between two products is shared out between them (see kernels.ops.rms_norm.BegunNorm). So no
norm kernel with few programs lies between them, for which all others would wait. The product before
the norm also writes the new stream times the norm's weight, and each program writes the sum of the
squares of its part of each row. The product after it multiplies its results by the scale that
follows from those sums, since a scale that is common to a row passes through the product. No value
is added atomically: the sums, and with them the results, are the same in every run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sidestep.kernels.launch import cdiv
from sidestep.kernels.ops.rms_norm import BegunNorm, RmsNorm, Stream
from sidestep.kernels.products import coded_linear_triton as coded
from sidestep.kernels.products import skinny_linear_triton as skinny
from sidestep.kernels.products import streamed_config as streamed
from sidestep.kernels.products.coded_linear_triton import CodedConfig
from sidestep.kernels.products.skinny_linear_triton import SkinnyConfig
from sidestep.kernels.products.streamed_config import OneRowConfig, StreamedConfig
from sidestep.kernels.products.tuned.tuned_products import PRODUCTS, ROWS
from sidestep.kernels.products.tuned.tuned_shares import SHARES
from sidestep.kernels.products.tuned.tuned_steps import STREAMED_ALONE
from sidestep.kernels.quantized.device_matrix import DeviceMatrix
from sidestep.kernels.wide_reads import wide_reads

Config = SkinnyConfig | StreamedConfig | CodedConfig | OneRowConfig
"""Configuration of a kernel. CodedConfig and OneRowConfig are for a DeviceMatrix, SkinnyConfig is
for tensors, and StreamedConfig for either."""


def choose(
    tokens: int, num_outputs: int, num_inputs: int, gated: bool, *, hopper: bool
) -> Config | None:
    """Return the configuration that reads W fastest, or None for the library.

    It is the tuned one if the size is known.
    """
    sizes = num_outputs, num_inputs, gated
    if hopper and tokens == 1 and sizes in STREAMED_ALONE:
        return streamed.config(tokens, *sizes)
    kind = PRODUCTS.get(sizes)
    if hopper and kind is not None and tokens <= ROWS[-1]:
        found = kind[next(i for i, rows in enumerate(ROWS) if tokens <= rows)]
        if found is None:
            return None
        return streamed.config(tokens, *sizes) if found == "streamed" else SkinnyConfig(*found)
    if tokens == 1:
        share = SHARES.get(sizes) if hopper else None
        return skinny.gemv_config(*sizes) if share is None else SkinnyConfig(*share)
    weights = num_outputs * num_inputs * (1 + gated)
    if (
        hopper
        and num_inputs % streamed.ALIGNED == 0
        and (weights >= 8 << 20 if tokens <= 8 else tokens <= 64)
    ):
        return streamed.config(tokens, *sizes)
    # The library reads large matrices as fast; for small ones, its overhead before and after the
    # product counts.
    if tokens > skinny.MAX_ROWS or weights > (32 << 20 if tokens <= 8 else 8 << 20):
        return None
    return skinny.skinny_config(*sizes)


def own_linear(
    x: Tensor | Stream,
    weight: Tensor | DeviceMatrix,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    config: Config,
    out: Tensor | None = None,
) -> Tensor:
    """Return x W^T + b, [T, N], which is `out` if that is given.

    x is [T, K], or a stream whose norm is multiplied; T is at most the number of rows that the
    config's kernel takes. W is [N, K] and contiguous.

    gated: W is the gate's matrix over the other's, [2 N, K], and the result is silu(x gate^T) * (x
    up^T).
    """
    squares, eps = None, 0.0
    if isinstance(x, Stream):
        eps = x.norm.eps
        x, squares = x.begun if isinstance(x.begun, BegunNorm) else (x.normed(), None)
    if out is None:
        out = x.new_empty(x.shape[0], weight.shape[0] // (1 + gated))
    _launch(x, weight, bias, squares, eps, out, None, None, gated, config, add=False)
    return out


def add_own_linear(
    residual: Tensor,
    x: Tensor,
    weight: Tensor | DeviceMatrix,
    bias: Tensor | None = None,
    *,
    norm: RmsNorm | None = None,
    config: Config,
) -> BegunNorm | None:
    """Add x W^T + b, as in own_linear, to residual [T, N], in place.

    norm: the norm that the sum goes through next. With it, begin that norm and return the part that
    is computed; else return None.
    """
    tokens, num_outputs = residual.shape
    begun = (
        None
        if norm is None
        else BegunNorm(
            x.new_empty(tokens, num_outputs),
            x.new_empty(tokens, cdiv(num_outputs, config.block_n), dtype=torch.float32),
        )
    )
    _launch(x, weight, bias, None, 0.0, residual, norm, begun, False, config, add=True)
    return begun


def _launch(
    x: Tensor,
    weight: Tensor | DeviceMatrix,
    bias: Tensor | None,
    squares: Tensor | None,
    eps: float,
    out: Tensor,
    norm: RmsNorm | None,
    begun: BegunNorm | None,
    gated: bool,
    config: Config,
    *,
    add: bool,
) -> None:
    """Launch the config's kernel. A tensor stands in for missing ones, which are not read."""
    other = weight if isinstance(weight, Tensor) else x
    b, given = other if bias is None else bias, other if squares is None else squares
    scales = other if norm is None else norm.weight
    weighted, sums = (other, other) if begun is None else begun
    tensors = (b, given, scales, out, weighted, sums)
    flags = (
        0 if squares is None else squares.shape[1],
        bias is not None,
        add,
        begun is not None,
        gated,
    )
    if isinstance(weight, DeviceMatrix):
        if isinstance(config, StreamedConfig):
            from sidestep.kernels.products.streamed_codes_gluon import launch as launch_codes

            with wide_reads(weight.words):
                launch_codes(x, weight, tensors, eps, flags, config)
        elif isinstance(config, OneRowConfig):
            from sidestep.kernels.products.one_row_codes_gluon import launch as launch_one_row

            launch_one_row(x, weight, tensors, eps, flags, config)
        else:
            assert isinstance(config, CodedConfig), "a coded matrix has kernels of its own"
            coded.launch(x, weight, tensors, eps, flags, config)
    elif isinstance(config, SkinnyConfig):
        skinny.launch(x, weight, tensors, eps, flags, config)
    else:
        assert isinstance(config, StreamedConfig), "the kernel of coded matrices takes no tensor"
        from sidestep.kernels.products.streamed_linear_gluon import launch

        launch(x, weight, tensors, eps, flags, config)
