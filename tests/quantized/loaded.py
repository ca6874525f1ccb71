"""Models on the CPU as workers build them, and the comparison of their weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from sidestep.executor.layers import matrix_products
from sidestep.executor.layers.matrix_products import CpuMatrix
from sidestep.executor.models.decoder import DecoderForCausalLM
from sidestep.executor.models.model_loading import load_model
from sidestep.executor.models.weight_memory import weights_of
from sidestep.executor.parallel.parallel_state import LoneRank
from sidestep.executor.runner.runner import WorkerArgs
from sidestep.executor.weights.weight_loader import Matrix
from sidestep.ipc.config_sections import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
from sidestep.ipc.model.model_spec import load_model_spec


def loaded(
    path: str, rank: int = 0, ranks: int = 1, *, whole_experts: bool = False, **model: Any
) -> DecoderForCausalLM:
    """Return a rank's part of a model in float32, with matrices decoded, so as to compare them.

    model: fields of ModelConfig.
    """
    from sidestep.ipc.config import with_whole_experts

    spec = load_model_spec(
        path,
        quantization=model.get("quantization"),
        head_quantization=model.get("head_quantization", "auto"),
    )
    args = WorkerArgs(
        rank=0,
        spec=with_whole_experts(spec) if whole_experts else spec,
        model=ModelConfig(model=path, **model),
        cache=CacheConfig(),
        parallel=ParallelConfig(device="cpu"),
        scheduler=SchedulerConfig(),
        max_model_len=256,
    )
    with decoded_matrices():
        return load_model(args, LoneRank(rank, ranks), torch.float32, torch.device("cpu"))


@contextmanager
def decoded_matrices() -> Iterator[None]:
    """Let models that are loaded within keep the numbers of matrices, so as to compare them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrix_products, "CpuMatrix", DecodedMatrix)
        yield


class DecodedMatrix(CpuMatrix):
    """Multiplies with the numbers of a matrix."""

    def __init__(self, matrix: Matrix, bias: torch.Tensor | None) -> None:
        super().__init__(matrix if isinstance(matrix, torch.Tensor) else matrix.decoded(), bias)


def check_equal(found: DecoderForCausalLM, expected: DecoderForCausalLM, rtol: float) -> None:
    """Assert that two models have the same weights. rtol: of each weight."""
    one, other = weights_of(found), weights_of(expected)
    assert one.keys() == other.keys()
    for path, tensor in one.items():
        pair = [t.to_dense() if t.is_mkldnn else t for t in (tensor, other[path])]
        torch.testing.assert_close(
            *pair,
            rtol=rtol,
            atol=1e-6 if rtol else 0,
            equal_nan=True,
            msg=path,
        )
