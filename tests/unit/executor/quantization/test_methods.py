"""Every registered method: its files are read as the decoder of their format reads them.

Each case writes a small model in the method's form, and plain with the decoded matrices. The
decoder is the method's own package where there is one, else arithmetic by hand.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from sidestep.ipc.common import registry
from tests.e2e.models import random_prompts
from tests.quantized.cases import CASES
from tests.quantized.loaded import check_equal, loaded
from tests.quantized.written import write
from tests.unit.executor.steps import Request
from tests.unit.executor.test_model_runner import make_runner, run

pytestmark = pytest.mark.usefixtures("one_thread")

EVERY = [(method, name) for method, cases in CASES.items() for name in cases]


def test_every_method_of_the_registry_has_cases() -> None:
    # GGUF files are whole models: see tests/unit/executor/model/test_gguf_families.py.
    assert {*CASES, "gguf"} == registry.QUANTIZATIONS.keys()


@pytest.mark.parametrize(("method", "name"), EVERY)
def test_files_are_read_as_their_decoder_reads_them(method: str, name: str, tmp_path: Path) -> None:
    case = CASES[method][name]
    written = write(case, tmp_path)
    for ranks in case.ranks:
        for rank in range(ranks):
            quantized, plain = (loaded(one, rank, ranks) for one in written)
            check_equal(quantized, plain, case.rtol)


@pytest.mark.parametrize("method", CASES)
def test_a_runner_generates_the_same_tokens_as_with_the_numbers(
    method: str, tmp_path: Path
) -> None:
    written = write(next(iter(CASES[method].values())), tmp_path)
    prompts = random_prompts(3, 250, longest=30)
    tokens, expected = (
        run(make_runner(one), [Request(prompt, 5) for prompt in prompts]) for one in written
    )
    assert tokens == expected and len(set(map(tuple, tokens))) > 1
