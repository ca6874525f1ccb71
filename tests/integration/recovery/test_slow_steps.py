"""Steps on a CPU that take longer than the limit for stalls: the machine is slow, and healthy."""

from __future__ import annotations

import asyncio
import time

import torch

from sidestep import AsyncLLM, EngineArgs, SamplingParams
from sidestep.executor.sampling.logits_processor import (
    EnteringRequest,
    LogitsProcessor,
    ProcessorSetup,
    Slots,
)

STALL_S = 0.5


class Slow(LogitsProcessor):
    """Logits processor whose first step takes a request's seconds of CPU time."""

    def __init__(self, setup: ProcessorSetup) -> None:
        super().__init__(setup)
        self._seconds = dict[int, float]()

    def enter(self, request: EnteringRequest) -> bool:
        self._seconds[request.slot] = request.controls.extra_args["Slow"]
        return True

    def leave(self, slot: int) -> None:
        self._seconds.pop(slot, None)

    def apply(self, logits: torch.Tensor, slots: Slots) -> None:
        for slot in slots:
            end = time.process_time() + self._seconds[slot]
            while time.process_time() < end:
                pass
            self._seconds[slot] = 0.0


async def test_a_step_that_computes_for_several_times_the_limit_is_no_stall() -> None:
    args = EngineArgs(device="cpu", stall_limit=STALL_S, logits_processors=[f"{__name__}:Slow"])
    async with AsyncLLM.from_engine_args(args) as llm:
        before = llm.pids
        async with asyncio.timeout(60):
            for seconds in (4 * STALL_S, 0.0):
                params = SamplingParams(max_tokens=3, ignore_eos=True, extra_args={"Slow": seconds})
                async for output in llm.generate([1, 2, 3], params):
                    pass
                assert len(output.outputs[0].token_ids) == 3
        assert llm.pids == before and not llm.recovery.restarts
