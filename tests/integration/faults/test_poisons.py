"""A request that kills its worker whenever it runs ends alone, after three deaths at most."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from sidestep.ipc.common.fault_plan import Fault, FaultKind
from sidestep.ipc.params.sampling_params import RequestOutputKind
from tests.integration.faults.asks import Ask, Reference
from tests.integration.faults.plans import POISON, Plan, poisoned
from tests.integration.faults.runs import Run

FORMS: tuple[dict[str, Any], ...] = (
    {"regex": "[0-9]{30}"},
    {"n": 4},
    {"logprobs": 3},
    {"beam_width": 2, "max_tokens": 6},
)


def asks_of(count: int, poisons: tuple[int, ...], num_frontends: int = 1) -> list[Ask]:
    """Return requests that come at once; the first ones, and a poison, have other forms."""
    asks = [
        Ask(
            **{
                "prompt": [5, 6, 7, i % 60 + 1, i // 60 + 1],
                "max_tokens": 20,
                "seed": i,
                "frontend": i % num_frontends,
                "output_kind": RequestOutputKind.DELTA,
                **(FORMS[i] if i < len(FORMS) else {}),
            }
        )
        for i in range(count)
    ]
    return [poisoned(ask) if i in poisons else ask for i, ask in enumerate(asks)]


async def check(
    fake_model: str,
    reference: Reference,
    asks: list[Ask],
    *,
    kind: FaultKind = "die",
    process: Literal["worker", "core"] = "worker",
    num_frontends: int = 1,
    **options: Any,
) -> None:
    """Run the requests; each poison alone must be blamed, after three deaths each at most."""
    plan = Plan(
        seed=0,
        options={
            "data_parallel_size": 1,
            "max_num_seqs": 64,
            "num_kv_blocks": 400,
            "restart_limit": 3,
            **options,
        },
        num_frontends=num_frontends,
        asks=asks,
        faults=[Fault(kind=kind, for_token=POISON, process=process)],
    )
    run = Run(plan, fake_model, reference)
    problems = await run.run()
    assert not problems, "\n".join(problems)
    poisons = [ask for ask in asks if POISON in ask.prompt]
    assert sorted(run.blamed, key=lambda ask: ask.seed) == poisons
    assert 2 <= run.num_restarts <= 3 * len(poisons)


@pytest.mark.parametrize("poison", [0, 1, 2, 3, 40], ids=["regex", "n", "logprobs", "beams", "any"])
async def test_of_64_requests_one_poison_ends_and_all_others_are_exact(
    fake_model: str, reference: Reference, poison: int
) -> None:
    await check(fake_model, reference, asks_of(64, (poison,)))


async def test_the_other_replica_never_dies(fake_model: str, reference: Reference) -> None:
    await check(fake_model, reference, asks_of(64, (40,)), data_parallel_size=2)


async def test_a_poison_for_the_core_itself_ends_too(fake_model: str, reference: Reference) -> None:
    """Such a core cannot say what had begun."""
    await check(fake_model, reference, asks_of(24, (7,)), process="core", max_num_seqs=8)


async def test_a_poison_that_hangs_its_worker_ends(fake_model: str, reference: Reference) -> None:
    await check(fake_model, reference, asks_of(24, (7,)), kind="hang", stall_limit=1.0)


async def test_a_poison_whose_steps_raise_ends(fake_model: str, reference: Reference) -> None:
    """The first failure in each start is a soft reset, and the second one a death."""
    await check(fake_model, reference, asks_of(24, (7,)), kind="raise")


@pytest.mark.parametrize("options", [{}, {"data_parallel_size": 2}, {"max_num_seqs": 4}], ids=str)
async def test_the_poison_of_one_frontend_ends_no_request_of_another(
    fake_model: str, reference: Reference, options: dict[str, Any]
) -> None:
    asks = asks_of(30, (17,), num_frontends=3)
    await check(fake_model, reference, asks, num_frontends=3, **options)


async def test_two_poisons_of_two_frontends_end(fake_model: str, reference: Reference) -> None:
    await check(fake_model, reference, asks_of(24, (8, 9), num_frontends=2), num_frontends=2)
