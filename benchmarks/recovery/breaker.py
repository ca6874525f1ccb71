"""A logits processor that breaks its worker when a file says so: a fault in a step of any device.

A request asks for it by `extra_args={"Breaker": {"fault": FAULT, "file": FILE}}`. The first step
with that request that finds the file removes it and breaks, so each file makes one fault, whatever
the number of workers that read it after one another.
"""

from __future__ import annotations

import os
import signal

import torch
from torch import Tensor

from sidestep.executor.sampling.logits_processor import (
    EnteringRequest,
    LogitsProcessor,
    ProcessorSetup,
    Slots,
)

TARGET = "benchmarks.recovery.breaker:Breaker"


class Breaker(LogitsProcessor):
    """Changes no logits.

    The fault 'trap' is a kernel that traps (on a CPU an illegal instruction), and 'memory' an
    allocation that asks for more than the device has.
    """

    def __init__(self, setup: ProcessorSetup) -> None:
        """Compile the kernel, so that the fault itself takes no time."""
        super().__init__(setup)
        self._wishes: dict[int, tuple[str, str]] = {}
        """By slot: the fault, and the file that allows it."""
        if setup.device.type == "cuda":
            from benchmarks.recovery.trap_triton import trap_if

            trap_if(torch.zeros(1, dtype=torch.int32, device=setup.device))

    def enter(self, request: EnteringRequest) -> bool:
        """Take the wish of a request."""
        wish = request.controls.extra_args.get("Breaker")
        if wish is None:
            return False
        self._wishes[request.slot] = (wish["fault"], wish["file"])
        return True

    def apply(self, logits: Tensor, slots: Slots) -> None:
        """Break, if a file of these slots is there."""
        for slot in slots:
            fault, file = self._wishes[slot]
            try:
                os.unlink(file)
            except FileNotFoundError:
                continue
            self._break(fault)

    def _break(self, fault: str) -> None:
        if fault == "memory":
            torch.empty(self._all_memory(), dtype=torch.uint8, device=self.setup.device)
        elif self.setup.device.type == "cuda":
            from benchmarks.recovery.trap_triton import trap_if

            trap_if(torch.ones(1, dtype=torch.int32, device=self.setup.device))
        else:
            signal.raise_signal(signal.SIGILL)

    def _all_memory(self) -> int:
        """Return the bytes of the device, of which the model has a part; of a CPU far more."""
        if self.setup.device.type == "cuda":
            return torch.cuda.mem_get_info(self.setup.device)[1]
        return 1 << 50
