"""Each fault of a plan happens, and its cause reaches the caller."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import msgspec
import psutil
import pytest

from sidestep import (
    AsyncLLM,
    EngineArgs,
    EngineDeadError,
    EngineStalledError,
    RequestOutputKind,
    SamplingParams,
    ValidationError,
)
from sidestep.executor.runner.fake import expected_tokens
from sidestep.ipc.common.fault_plan import Fault, FaultPlan
from tests.integration.faults.plans import causes

MakeLLM = Callable[..., AsyncLLM]
DELTA = RequestOutputKind.DELTA
REGEX = {"structured_outputs": {"regex": "[0-9]{40}"}}
FAULTS = [
    Fault(kind="die", at=5, rank=1),
    Fault(kind="die", at=5, process="core"),
    Fault(kind="raise", at=0),
    Fault(kind="raise", for_token=7, rank=1),
    Fault(kind="drop", at=5, message="step"),
    Fault(kind="drop", at=5, message="masks"),
    Fault(kind="drop", at=5, message="output"),
    Fault(kind="corrupt", at=5, message="step", rank=1),
    Fault(kind="corrupt", at=5, message="masks"),
    Fault(kind="corrupt", at=5, message="output"),
]


def plan_of(*faults: Fault) -> dict[str, Any]:
    """Return the option `fake_faults`."""
    plan: dict[str, Any] = msgspec.to_builtins(FaultPlan(faults))
    return plan


async def tokens_of(llm: AsyncLLM, prompt: list[int], told: list[int], **fields: Any) -> None:
    """Add a request's tokens to `told`."""
    params: dict[str, Any] = {"max_tokens": 40, "seed": 1, "output_kind": DELTA, **fields}
    async for output in llm.generate(prompt, SamplingParams(**params)):
        told += output.outputs[0].token_ids


@pytest.mark.parametrize(
    "fault", FAULTS, ids=lambda fault: f"{fault.kind}-{fault.message or fault.process}"
)
async def test_a_fault_happens_and_its_cause_is_named(make_llm: MakeLLM, fault: Fault) -> None:
    llm = make_llm(tensor_parallel_size=2, restart_limit=0, fake_faults=plan_of(fault))
    fields = REGEX if fault.message == "masks" else {"ignore_eos": True, "max_tokens": 1500}
    told: list[int] = []
    with pytest.raises(EngineDeadError) as caught:
        await tokens_of(llm, [5, 6, 7], told, **fields)
    assert any(re.search(cause, str(caught.value)) for cause in causes(fault)), str(caught.value)
    if "ignore_eos" in fields:
        expected = expected_tokens([5, 6, 7], 1500, 1, llm.get_tokenizer().vocab_size)
        assert told == expected[: len(told)]
        # A rank that answers has given the tokens of the steps before; the core may be ahead of
        # another rank.
        assert len(told) <= 5 or fault.rank == 1


@pytest.mark.parametrize("process", ["worker", "core"])
async def test_a_process_that_hangs_makes_the_engine_unhealthy(
    make_llm: MakeLLM, process: Any
) -> None:
    llm = make_llm(fake_faults=plan_of(Fault(kind="hang", at=3, process=process)))
    stream = asyncio.create_task(tokens_of(llm, [5, 6], [], ignore_eos=True))
    with pytest.raises(EngineStalledError):
        async with asyncio.timeout(30):
            while True:
                await llm.check_health(timeout_s=0.2, max_stall_s=0.2)
    stream.cancel()
    psutil.Process(llm.pids["core" if process == "core" else "worker_0"]).kill()


async def test_a_poison_harms_only_the_engine_that_runs_it_and_a_slow_rank_no_token(
    make_llm: MakeLLM,
) -> None:
    llm = make_llm(
        fake_faults=plan_of(Fault(kind="die", for_token=7), Fault(kind="slow", at=2, seconds=0.001))
    )
    told: list[int] = []
    await tokens_of(llm, [5, 6], told, ignore_eos=True)
    assert told == expected_tokens([5, 6], 40, 1, llm.get_tokenizer().vocab_size)
    with pytest.raises(EngineDeadError, match="worker 0 .*SIGKILL"):
        await tokens_of(llm, [5, 7], [], ignore_eos=True)


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "explode", "at": 1},
        {"kind": "die"},
        {"kind": "die", "at": 1, "for_token": 1},
        {"kind": "die", "at": 1, "message": "step"},
        {"kind": "drop", "at": 1},
        {"kind": "drop", "for_token": 1, "message": "step"},
        {"kind": "raise", "at": 1, "process": "core"},
        {"kind": "slow", "at": 1},
        {"kind": "die", "at": 1, "seconds": 1.0},
        {"kind": "die", "at": 1, "when": "now"},
    ],
)
def test_a_plan_that_cannot_be_is_refused(fault: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"^fake_faults: "):
        EngineArgs(device="fake", fake_faults={"faults": [fault]})


def test_a_plan_for_a_real_device_is_refused() -> None:
    with pytest.raises(ValidationError, match="only with device 'fake', not 'cpu'"):
        EngineArgs(device="cpu", fake_faults=plan_of(FAULTS[0]))
