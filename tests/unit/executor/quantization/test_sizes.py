"""The bytes that are planned for quantized weights are those that a worker holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from sidestep.executor.quantization.quantized_files import CheckpointMatrices, EncodedMatrices
from sidestep.executor.weights.weight_loader import Matrix, Wanted, Weights
from sidestep.frontend.planning.machine import GpuInfo, Machine
from sidestep.frontend.planning.topology import sizes
from sidestep.frontend.planning.weight_size import weight_size
from sidestep.ipc.config_sections import CacheConfig
from sidestep.ipc.model.layer_split import stage_of
from sidestep.ipc.model.model_spec import load_model_spec
from sidestep.ipc.model.quantization.online import ONLINE
from sidestep.kernels.quantized.coded_matrix import CodedMatrix
from tests.e2e.models import write_model
from tests.quantized.cases import CASES
from tests.quantized.loaded import loaded
from tests.quantized.written import SIZES, state, write

FLOAT32 = 4
READ_SEVERAL_TIMES = ("grouped-heads", "grouped-heads-by-tensor")
"""Cases whose stored matrices are read once for each of their parts."""
EVERY = [
    (method, name)
    for method, cases in CASES.items()
    for name, case in cases.items()
    if name not in READ_SEVERAL_TIMES and case.size_is_stated
]


class Read:
    """Counts the quantized matrices that a model reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.numbers = self.num_bytes = 0
        for kind in (CheckpointMatrices, EncodedMatrices):
            monkeypatch.setattr(kind, "__call__", self._counting(kind.__call__))
        monkeypatch.setattr(EncodedMatrices, "together", self._counting(EncodedMatrices.together))

    def _counting(self, plain: Any) -> Any:
        def call(matrices: Any, weights: Weights, wanted: Wanted | Sequence[Wanted]) -> Any:
            found: Matrix | Sequence[Matrix] | None = plain(matrices, weights, wanted)
            for one in found if isinstance(found, list) else (found,):
                self._count(one)
            return found

        return call

    def _count(self, found: Any) -> None:
        if isinstance(found, CodedMatrix):
            parts = (found.codes, found.scales, found.zeros, found.minimums)
            self.num_bytes += sum(part.nbytes for part in parts if part is not None)
        elif isinstance(found, Tensor):
            self.num_bytes += found.nbytes
        self.numbers += 0 if found is None else found.shape[0] * found.shape[1]


def check(read: Read, path: str, ranks: int, quantization: str | None = None) -> None:
    """Assert that a planned rank has the bytes of what was read, in place of plain numbers."""
    # A CPU keeps heads as small as these.
    spec = load_model_spec(path, quantization=quantization, head_quantization="none")
    stage = stage_of((spec.num_layers,), 0)
    plain, planned = (
        weight_size(spec, ranks, stage, FLOAT32, keeps_codes=codes).held for codes in (False, True)
    )
    held = plain - FLOAT32 * read.numbers + read.num_bytes
    assert planned == pytest.approx(held, rel=0.05)
    quantized_part = planned - (plain - FLOAT32 * read.numbers)
    assert quantized_part == pytest.approx(read.num_bytes, rel=0.05)


@pytest.mark.parametrize(("method", "name"), EVERY)
def test_planned_bytes_are_those_of_the_codes_and_scales(
    method: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, read = CASES[method][name], Read(monkeypatch)
    path = write(case, tmp_path).quantized
    loaded(path, 0, case.ranks[-1])
    assert read.numbers
    check(read, path, case.ranks[-1])


@pytest.mark.parametrize("choice", ONLINE)
@pytest.mark.parametrize("family", ["llama-mqa-odd-sizes", "qwen3-moe"])
def test_planned_bytes_of_what_is_quantized_while_it_loads(
    choice: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Read(monkeypatch)
    path = write_model(family, tmp_path)
    loaded(path, quantization=choice)
    check(read, path, 1, choice)


@pytest.mark.parametrize("tied", [False, True])
def test_a_rounded_head_is_planned_beside_an_embedding_that_it_equals(
    tied: bool, tmp_path: Path
) -> None:
    path = write_model("llama-gqa", tmp_path, **SIZES, tie_word_embeddings=tied)
    plain, rounded = (
        weight_size(spec, 1, stage_of((spec.num_layers,), 0), FLOAT32, keeps_codes=True)
        for spec in (load_model_spec(path, head_quantization=one) for one in ("none", "int8"))
    )
    spec = load_model_spec(path)
    numbers = spec.vocab_size * spec.hidden_size
    codes = numbers + FLOAT32 * spec.vocab_size
    assert rounded.held - plain.held == codes - (0 if tied else FLOAT32 * numbers)
    assert plain.read - rounded.read == FLOAT32 * numbers - codes


def test_a_table_of_sizes_counts_codes_on_gpus_and_numbers_on_cpus(tmp_path: Path) -> None:
    """Take the shape of Llama 3.1 8B, whose head and embedding stay plain."""
    shape = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }
    path = write_model("llama-gqa", tmp_path / "small", **SIZES)
    config = Path(path) / "config.json"
    import json

    config.write_text(json.dumps({**json.loads(config.read_text()), **shape, "dtype": "bfloat16"}))
    plain = load_model_spec(path)
    state(Path(path), {"quant_method": "fp8", "weight_block_size": [128, 128]})
    fp8 = load_model_spec(path)
    gpu = Machine([GpuInfo("imagined", 80 << 30, 4e12)], {}, 8, 64 << 30)
    cpu = Machine([], {}, 8, 64 << 30)

    def size(spec: Any, machine: Machine, dtype: str) -> Any:
        (found,) = sizes(spec, machine, dtype=dtype, max_model_len=8192, cache=CacheConfig())
        return found

    table = 128256 * 4096
    layers = 8_030_261_248 - 2 * table
    before, after = (size(spec, gpu, "bfloat16") for spec in (plain, fp8))
    assert before.weight_bytes == 2 * 8_030_261_248
    assert after.weight_bytes == pytest.approx(layers + 4 * table, rel=1e-3)
    assert after.token_floor_ms == pytest.approx((layers + 2 * table) / 4e12 * 1e3, rel=1e-3)
    assert after.token_floor_ms < 0.55 * before.token_floor_ms
    assert after.cache_tokens > before.cache_tokens
    rounded = size(load_model_spec(path, head_quantization="int8"), gpu, "bfloat16")
    assert after.weight_bytes - rounded.weight_bytes == table - 4 * 128256
    on_cpu = [size(spec, cpu, "float32").weight_bytes for spec in (plain, fp8)]
    assert on_cpu == [2 * 8_030_261_248, 4 * 8_030_261_248]
