"""The needs of GPUs after a death, as a library that the test plays tells them."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from sidestep.executor.hosts.multiproc import MultiprocExecutor
from sidestep.executor.processes.gpu_recovery import FieldValue, load_nvml, what_gpus_need
from sidestep.frontend.options.engine_args import EngineArgs

UUID = "GPU-8f2a6ee5"


class FakeNvml:
    """NVML on a machine with GPUs 0 and 1, the second of which has a UUID."""

    def __init__(self, actions: dict[int, int], *, lookup: int = 0, init: int = 0) -> None:
        """actions: recovery action by GPU; a GPU without one does not know the field."""
        self._actions = actions
        self._lookup, self._init = lookup, init
        self.num_open = 0

    def nvmlInit_v2(self) -> int:
        self.num_open += not self._init
        return self._init

    def nvmlShutdown(self) -> int:
        self.num_open -= 1
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, device: Any) -> int:
        device._obj.value = index.value + 1
        return self._lookup

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, device: Any) -> int:
        assert uuid == UUID.encode()
        device._obj.value = 2
        return self._lookup

    def nvmlDeviceGetFieldValues(self, device: Any, count: Any, values: Any) -> int:
        asked = values._obj
        assert (count.value, asked.field, ctypes.sizeof(FieldValue)) == (1, 230, 40)
        action = self._actions.get(device.value - 1)
        asked.result, asked.value = (3, 0) if action is None else (0, action)
        return 0


@pytest.mark.parametrize(
    ("gpus", "nvml", "told"),
    [
        (["0", "1"], FakeNvml({0: 0, 1: 0}), None),
        (["0", "1"], FakeNvml({0: 0, 1: 1}), "GPU 1 needs a reset"),
        (["0"], FakeNvml({0: 0, 1: 1}), None),
        ([UUID], FakeNvml({1: 2}), f"GPU {UUID} needs a reboot of the machine"),
        (
            ["0", "1"],
            FakeNvml({0: 4, 1: 9}),
            "GPU 0 needs a reset, after its other programs have ended; "
            "GPU 1 needs recovery action 9 of NVML",
        ),
        (["0"], FakeNvml({}), None),
        (["0"], FakeNvml({}, init=9), None),
        (["0"], FakeNvml({}, lookup=6), None),
        (["0"], FakeNvml({}, lookup=15), "GPU 0 needs a reboot of the machine: it is lost"),
        (["0"], None, None),
    ],
)
def test_what_the_driver_asks_for_is_said(
    gpus: list[str], nvml: FakeNvml | None, told: str | None
) -> None:
    assert what_gpus_need(gpus, nvml) == told
    assert nvml is None or nvml.num_open == 0


def test_only_a_replica_s_own_gpus_count(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[list[str]]()

    def need(gpus: list[str], nvml: object) -> str:
        asked.append(list(gpus))
        return "GPU needs a reset"

    module = "sidestep.executor.hosts.local_ranks"
    monkeypatch.setattr(f"{module}.what_gpus_need", need)
    monkeypatch.setattr(f"{module}.has_driver", lambda: True)
    config = EngineArgs(device="cuda", data_parallel_size=2).create_engine_config()
    assert MultiprocExecutor(config, 1, 1).what_devices_need() == "GPU needs a reset"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"3,{UUID}")
    MultiprocExecutor(config, 1, 1).what_devices_need()
    assert asked == [["1"], [UUID]]
    fake = EngineArgs(device="fake").create_engine_config()
    assert MultiprocExecutor(fake, 0, 1).what_devices_need() is None


def test_nothing_happens_where_the_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert load_nvml() is None and what_gpus_need(["0"], load_nvml()) is None
