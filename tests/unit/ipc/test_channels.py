"""Channels: messages of both directions arrive whole and in order, and a broken one harms nobody."""

import os
import select

from sidestep.ipc.channels import CoreChannel, FrontendChannel
from sidestep.ipc.messages import AbortRequests, Answer, Call, ToCore


def receive(channel: CoreChannel, count: int) -> list[ToCore]:
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    got: list[ToCore] = channel.receive()
    while len(got) < count:
        assert poll.poll(10_000), "a message was lost"
        got += channel.receive()
    return got


def test_both_directions_in_order() -> None:
    frontend = FrontendChannel()
    core = CoreChannel([frontend.address])
    sent = [Call(client=0, call_id=i, method="ping") for i in range(500)]
    for message in sent:
        frontend.send(message)
    assert receive(core, 500) == sent
    core.send(0, Answer(call_id=3))
    assert frontend.wait_message(10) == Answer(call_id=3)
    core.close()
    frontend.close()


def test_a_message_that_cannot_be_read_is_dropped_and_the_next_is_served() -> None:
    frontend = FrontendChannel()
    core = CoreChannel([frontend.address])
    frontend._out.send(b"\xff garbage")
    frontend.send(AbortRequests(client=0, handles=[1]))
    assert receive(core, 1) == [AbortRequests(client=0, handles=[1])]
    core.close()
    frontend.close()


def test_sealing_leaves_no_file_and_messages_still_flow() -> None:
    frontend = FrontendChannel()
    core = CoreChannel([frontend.address])
    frontend.send(Call(client=0, call_id=1, method="ping"))
    receive(core, 1)
    folder = os.path.dirname(frontend.address.to_core.removeprefix("ipc://"))
    assert os.path.isdir(folder)
    frontend.seal()
    assert not os.path.exists(folder)
    core.send(0, Answer(call_id=1))
    assert frontend.wait_message(10) == Answer(call_id=1)
    core.close()
    frontend.close()
