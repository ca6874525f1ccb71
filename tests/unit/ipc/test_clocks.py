"""Times between hosts: relative on the way, and records moved by a measured offset."""

from __future__ import annotations

import random
import time

from sidestep.ipc.params.sampling_params import SamplingParams
from sidestep.ipc.processes.addresses import new_remote_address
from sidestep.ipc.transport import clocks
from sidestep.ipc.transport.channels import CoreChannel, FrontendChannel
from sidestep.ipc.transport.clocks import ClockOffset, moved_request, moved_step
from sidestep.ipc.transport.messages import AddRequest, Answer, Call, Outputs, Started
from sidestep.ipc.transport.records import STEP_ROW, RequestRecord, unpack_steps

LIMIT_S = 60.0


def test_an_offset_is_as_right_as_half_of_the_quickest_answer() -> None:
    rng = random.Random(1)
    offset, ahead, now = ClockOffset(), 10**12, 5 * 10**9
    assert offset.ns == 0
    best = 10**18
    for _ in range(10):
        there, back = rng.randrange(10**6), rng.randrange(10**6)
        offset.answered(now, now + there + ahead, now + there + back)
        best = min(best, there + back)
        now += 10**9
    assert abs(offset.ns - ahead) <= best / 2 + 1


def test_deadlines_are_seconds_left_on_the_way() -> None:
    address = new_remote_address("127.0.0.1")
    frontend, core = FrontendChannel(address), CoreChannel([address.for_core])
    now = time.monotonic()
    core.send(0, Answer(call_id=1))
    answer = frontend.wait_message(LIMIT_S)
    assert isinstance(answer, Answer) and answer.now_ns is not None
    frontend.seal()
    message = AddRequest(
        client=0,
        handle=0,
        request_id="",
        prompt_token_ids=b"",
        sampling=SamplingParams(),
        arrival=now - 2.0,
        deadline=now + 5.0,
    )
    frontend.send(message)
    frontend.send(Call(client=0, call_id=1, method="ping"))
    (sent, call) = received(core, 2)
    assert isinstance(sent, AddRequest) and isinstance(call, Call)
    late = sent.arrival - (now - 2.0)
    assert 0 <= late < LIMIT_S and sent.deadline is not None
    assert abs(sent.deadline - (now + 5.0) - late) < 1e-6
    raw = clocks.moved_to_core(message, -now)
    assert isinstance(raw, AddRequest) and raw.arrival == -2.0 and raw.deadline == 5.0
    started = [Started(handle=0, num_cached_tokens=0, scheduled=now)]
    core.send(0, Outputs(handles=b"", token_ids=b"", started=started))
    outputs = frontend.wait_message(LIMIT_S)
    assert isinstance(outputs, Outputs) and 0 <= outputs.started[0].scheduled - now < LIMIT_S
    core.close()
    frontend.close()


def received(core: CoreChannel, count: int) -> list[object]:
    got: list[object] = []
    end = time.monotonic() + LIMIT_S
    while len(got) < count:
        assert time.monotonic() < end
        got += core.receive()
    return got


def test_records_move_in_all_their_times() -> None:
    counts = tuple(range(11))
    (step,) = unpack_steps(STEP_ROW.pack(*counts, *range(100, 109), 1, 2, 3, 4))
    (later_step,) = unpack_steps(STEP_ROW.pack(*counts, *range(1100, 1109), 1, 2, 3, 4))
    assert moved_step(step, 1000) == later_step
    request = RequestRecord(
        request_id="one",
        client=0,
        status="waiting",
        waiting_for=None,
        num_prompt_tokens=1,
        num_cached_tokens=0,
        num_output_tokens=0,
        num_preemptions=0,
        arrival_ns=100,
        queued_ns=110,
        scheduled_ns=None,
        first_token_ns=None,
        finished_ns=None,
        finish_reason=None,
    )
    later = moved_request(request, 1000)
    assert (later.arrival_ns, later.queued_ns, later.scheduled_ns) == (1100, 1110, None)
