"""The weights of a model, and their way to the host's memory and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sidestep.executor.layers.vocab import VocabParallelEmbedding
from sidestep.executor.models.decoder import DecoderForCausalLM
from sidestep.executor.models.new_weights import check_same_weights, copy_weights
from sidestep.executor.models.weight_memory import HostCopy, weight_bytes, weights_of
from sidestep.executor.parallel.parallel_state import LoneRank, Parallel
from sidestep.executor.runner.worker_calls import CallRefusedError
from sidestep.executor.weights.weight_loader import DummyWeights
from sidestep.kernels.gpu import Gpu, like_gpu
from sidestep.kernels.native.packing import exact_type
from tests.fakes import make_spec


def model_of(parallel: Parallel, seed: int = 0, **changes: Any) -> DecoderForCausalLM:
    """Return a model whose layers keep their weights as on a GPU."""
    with like_gpu(Gpu(90, 132), "cpu"):
        return DecoderForCausalLM(
            make_spec(**changes),
            DummyWeights(seed, torch.float32, torch.device("cpu")),
            parallel,
        )


@pytest.mark.parametrize("parallel", [Parallel(), LoneRank(0, 1)])
def test_every_weight_of_a_model_is_found_once_a_path(parallel: Parallel) -> None:
    weights = weights_of(model_of(parallel))
    shapes = sorted(tuple(tensor.shape) for tensor in {id(t): t for t in weights.values()}.values())
    # The embedding, which is the head too; the norms; and the products of the only layer.
    assert shapes == sorted([(50, 8), (8,), (8,), (8,), (24, 8), (8, 8), (16, 8), (8, 8)])
    tied = [path for path, tensor in weights.items() if tensor.shape == (50, 8)]
    assert len(tied) == 2 and weights[tied[0]] is weights[tied[1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_weights_of_a_cpu_are_found_in_each_layout(dtype: torch.dtype) -> None:
    """On a CPU the head is laid out apart from the embedding that it equals."""
    on_gpu = {id(tensor): tensor for tensor in weights_of(model_of(Parallel())).values()}
    on_cpu = DecoderForCausalLM(
        make_spec(), DummyWeights(0, dtype, torch.device("cpu")), Parallel()
    )
    found = {id(tensor): tensor for tensor in weights_of(on_cpu).values()}
    expected = [tensor.numel() for tensor in on_gpu.values()]
    # A layout that is no copy leaves the head in the embedding's memory.
    assert sorted(t.numel() for t in found.values()) in (
        sorted([*expected, 50 * 8]),
        sorted(expected),
    )
    assert weight_bytes(on_cpu) == sum(tensor.nbytes for tensor in found.values())


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float16], ids=str)
def test_a_table_of_a_file_in_16_bits_keeps_them_on_a_cpu(kept: torch.dtype) -> None:
    whole = (torch.rand(50, 8) + 1).to(kept).float()
    if exact_type(whole) == torch.float32:
        pytest.skip("there is no compiler")
    table = VocabParallelEmbedding(whole, Parallel(), scale=3.0)
    assert weight_bytes(table) == 50 * 8 * 2
    ids = torch.tensor([3, 49, 3, 0])
    assert torch.equal(table.vectors(ids), whole[ids] * 3)


def test_freed_weights_take_no_bytes() -> None:
    model = model_of(Parallel())
    whole, copy = weight_bytes(model), HostCopy(weights_of(model).values())
    assert whole == copy.num_bytes > 0
    copy.free()
    assert weight_bytes(model) == 0


def test_memory_that_is_freed_comes_back_with_its_content() -> None:
    whole = torch.arange(12.0)
    part, other = whole[3:6], torch.ones(4, dtype=torch.int32)
    before = [tensor.clone() for tensor in (whole, part, other)]
    copy = HostCopy([whole, part, other])
    assert copy.num_bytes == 12 * 4 + 4 * 4
    copy.free()
    assert whole.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    copy.restore()
    assert all(map(torch.equal, (whole, part, other), before))


def test_all_weights_of_a_model_are_copied_over_those_of_another() -> None:
    old, new = model_of(Parallel()), model_of(Parallel(), seed=1)
    places = {path: tensor.data_ptr() for path, tensor in weights_of(old).items()}
    check_same_weights(old, new)
    copy_weights(old, new)
    for path, tensor in weights_of(old).items():
        assert torch.equal(tensor, weights_of(new)[path]) and tensor.data_ptr() == places[path]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"hidden_size": 16}, r"is \[50, 8\] torch.float32, and \[50, 16\]"),
        (
            {"mixer": {"head_norms": True}},
            "only one of the old and the new weights has .*_head_norms",
        ),
        ({"tie_word_embeddings": False}, "only one of the old and the new head"),
    ],
)
def test_weights_of_another_model_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(CallRefusedError, match=problem):
        check_same_weights(model_of(Parallel()), model_of(Parallel(), **changes))
