"""Products of a layer, each by itself, which gpu_kernels.py times."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from benchmarks.kernels.gpu_models import Model
from benchmarks.kernels.gpu_timing import (
    DEVICE,
    DTYPE,
    L2_BYTES,
    Call,
    microseconds,
    relative_error,
    repeated,
)
from sidestep.kernels.gpu import is_hopper
from sidestep.kernels.products.gated.gated_gemm_triton import (
    GatedConfig,
    default_config,
    gated_gemm,
)
from sidestep.kernels.products.gated.gated_gemm_triton import choose as choose_gated
from sidestep.kernels.products.own_linear import Config, choose, own_linear
from sidestep.kernels.triton.silu_mul_triton import silu_mul


def check_linear(outputs: int, inputs: int, gated: bool, rows: int, config: Config) -> float:
    """Return the relative error of a product on fresh inputs."""
    x = torch.randn(rows, inputs, dtype=DTYPE, device=DEVICE)
    weight = torch.randn(outputs * (1 + gated), inputs, dtype=DTYPE, device=DEVICE) * inputs**-0.5
    reference = x.double() @ weight[: 4096 if not gated else None].double().t()
    if gated:
        gate, up = reference.chunk(2, -1)
        reference = F.silu(gate) * up
    return relative_error(
        own_linear(x, weight, gated=gated, config=config)[:, : reference.shape[1]], reference
    )


class Linear:
    """Copies of a matrix, together larger than L2, to multiply by a few rows."""

    def __init__(self, outputs: int, inputs: int, gated: bool, rows: int) -> None:
        self.shape = (outputs, inputs, gated, rows)
        self.bytes = outputs * (1 + gated) * inputs * 2
        copies = max(2, math.ceil(2 * L2_BYTES / self.bytes))
        self.weights = [
            torch.randn(outputs * (1 + gated), inputs, dtype=DTYPE, device=DEVICE)
            for _ in range(copies)
        ]
        self.x = torch.randn(rows, inputs, dtype=DTYPE, device=DEVICE)

    def time(self, config: Config | None = None) -> float:
        """Return the time in microseconds, or infinity if the result is wrong.

        config: the engine's own choice if not given; without one the time is NaN.
        """
        outputs, inputs, is_gated, rows = self.shape
        config = config or choose(rows, outputs, inputs, is_gated, hopper=is_hopper(DEVICE))
        if config is None:
            return math.nan
        if (error := check_linear(*self.shape, config)) > 1e-2:
            print(f"wrong: {self.shape} {config} error {error}")
            return math.inf
        gated = self.shape[2]
        calls: list[Call] = [
            lambda w=w: own_linear(self.x, w, gated=gated, config=config) for w in self.weights
        ]
        return microseconds(repeated(calls, 20))

    def library(self) -> float:
        """Return the time of torch.nn.functional.linear, and of the gated activation after it."""
        gated = self.shape[2]
        calls: list[Call] = [
            lambda w=w: silu_mul(F.linear(self.x, w)) if gated else F.linear(self.x, w)
            for w in self.weights
        ]
        return microseconds(repeated(calls, 20))


class Gated(Linear):
    """Gated product of many rows, with the activation."""

    def __init__(self, model: Model, rows: int) -> None:
        super().__init__(model.inner, model.hidden, True, rows)
        self.operations = 4 * rows * model.inner * model.hidden
        self.chosen = choose_gated(rows, model.inner, model.hidden, DEVICE) or default_config(rows)

    def error(self, config: GatedConfig) -> float:
        """Return the relative error of columns of every tile against a float64 reference.

        It is infinite if a second run differs.
        """
        weight = self.weights[0]
        out = gated_gemm(self.x, weight, config=config)
        if not torch.equal(out, gated_gemm(self.x, weight, config=config)):
            return math.inf
        gate, up = (self.x.double() @ half[::29].double().t() for half in weight.chunk(2))
        return relative_error(out[:, ::29], F.silu(gate) * up)

    def took(self, config: GatedConfig) -> float:
        """Return the time in microseconds, or infinity if the result is wrong."""
        if (error := self.error(config)) > 1e-2:
            print(f"wrong: {self.shape} {config} error {error}")
            return math.inf
        return microseconds(
            repeated([lambda w=w: gated_gemm(self.x, w, config=config) for w in self.weights], 20)
        )
