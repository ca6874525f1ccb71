"""The table of products of tensor-parallel ranks equals its benchmark's output."""

from __future__ import annotations

from pathlib import Path

from benchmarks.kernels.gpu_models import MODELS
from benchmarks.kernels.gpu_shares import shares, table_text
from sidestep.kernels.products.tuned import tuned_shares


def test_the_table_is_kept_where_nothing_was_measured_anew() -> None:
    text = Path(tuned_shares.__file__).read_text()
    assert table_text({}) == text
    assert "    (4096, 7, False): (2, 1024, 4, False),\n" in table_text(
        {(4096, 7, False): (2, 1024, 4, False)}
    )


def test_ranks_have_the_shapes_that_the_engine_gives_them() -> None:
    """Cover more ranks than KV heads: each rank then has one."""
    model = next(m for m in MODELS if m.name == "Llama-3.1-8B")
    assert shares(model, 1) == {**model.linears(), "lm_head": (128256, 4096, False)}
    assert shares(model, 16)["qkv"] == ((2 + 2) * 128, 4096, False)
