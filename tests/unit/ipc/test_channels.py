"""Channels: messages of both directions arrive whole and in order.

A broken message harms no other.
"""

import os
import select

import pytest
import zmq

from sidestep.ipc.processes.addresses import ClientAddress, new_address
from sidestep.ipc.transport.channels import Broken, CoreChannel, FrontendChannel
from sidestep.ipc.transport.envelope import Refused
from sidestep.ipc.transport.messages import AbortRequests, Answer, Call, ToCore


def receive(channel: CoreChannel, count: int) -> list[ToCore | Refused]:
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    got = channel.receive()
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


def test_messages_that_are_sent_together_arrive_together() -> None:
    frontend = FrontendChannel()
    core = CoreChannel([frontend.address])
    sent = [Call(client=0, call_id=i, method="ping") for i in range(500)]
    frontend.send(*sent[:499])
    frontend.send(sent[499])
    poll = select.poll()
    poll.register(core.fileno(), select.POLLIN)
    got = core.receive()
    while not got:
        assert poll.poll(10_000), "a message was lost"
        got = core.receive()
    assert got[:499] == sent[:499]
    assert got[499:] + receive(core, 500 - len(got)) == sent[499:]
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


def test_a_message_is_its_sender_s_whatever_it_says() -> None:
    first, second = FrontendChannel(), FrontendChannel()
    core = CoreChannel([first.address, second.address])
    first.send(AbortRequests(client=1, handles=[1]))
    second.send(AbortRequests(client=1, handles=[2]))
    got = receive(core, 2)
    assert AbortRequests(client=1, handles=[2]) in got
    (refused,) = [one for one in got if isinstance(one, Refused)]
    assert refused.client == 0 and "of frontend 1, not 0" in refused.problem
    core.close()
    first.close()
    second.close()


def test_an_address_that_is_none_leaves_the_core_as_it_was() -> None:
    frontend = FrontendChannel()
    core = CoreChannel([frontend.address])
    for address in (ClientAddress("nowhere", "nowhere"), ClientAddress("ipc:///a", "\0")):
        with pytest.raises((zmq.ZMQError, ValueError)):
            core.connect(address)
    late = FrontendChannel()
    assert core.connect(late.address) == 1
    for client, each in enumerate((frontend, late)):
        each.send(Call(client=client, call_id=1, method="ping"))
    assert len(receive(core, 2)) == 2
    for end in (core, frontend, late):
        end.close()


def test_a_frontend_reads_nothing_behind_a_message_that_it_cannot_read() -> None:
    frontend = FrontendChannel()
    core = CoreChannel([frontend.address])
    core.send(0, Answer(call_id=1))
    core._out[0].send(b"\xff garbage")
    core.send(0, Answer(call_id=2))
    assert frontend.wait_message(10) == Answer(call_id=1)
    broken = frontend.wait_message(10)
    assert isinstance(broken, Broken) and "could not be read" in broken.cause
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


def wait_until_gone(channel: CoreChannel) -> list[int]:
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    while not (gone := channel.take_gone()):
        assert poll.poll(10_000), "nobody was told"
    return gone


def test_the_core_serves_several_frontends_and_sees_one_leave() -> None:
    first, second = FrontendChannel(), FrontendChannel()
    core = CoreChannel([first.address])
    assert core.connect(second.address) == 1
    for client, frontend in enumerate((first, second)):
        core.send(client, Answer(call_id=client))
        assert frontend.wait_message(10) == Answer(call_id=client)
        frontend.send(Call(client=client, call_id=7, method="ping"))
    assert {message.client for message in receive(core, 2)} == {0, 1}
    assert core.take_gone() == []
    second.close()
    assert wait_until_gone(core) == [1]
    core.send(1, Answer(call_id=1))  # there is no receiver: nothing happens
    core.broadcast(Answer(call_id=9))
    assert first.wait_message(10) == Answer(call_id=9)
    assert core.take_gone() == []
    core.close()
    first.close()


def test_a_frontend_may_listen_long_after_the_core_knows_its_address() -> None:
    address = new_address()
    core = CoreChannel([])
    core.send(core.connect(address), Answer(call_id=5))
    late = FrontendChannel(address)
    assert late.wait_message(10) == Answer(call_id=5)
    late.send(Call(client=0, call_id=1, method="ping"))
    assert receive(core, 1) == [Call(client=0, call_id=1, method="ping")]
    core.close()
    late.close()


def test_a_frontend_sees_the_core_leave() -> None:
    frontend = FrontendChannel()
    core = CoreChannel([frontend.address])
    core.send(0, Answer(call_id=5))
    assert frontend.wait_message(10) == Answer(call_id=5)
    assert not frontend.core_is_gone()
    poll = select.poll()
    poll.register(frontend.gone_fileno(), select.POLLIN)
    core.close()
    while not frontend.core_is_gone():
        assert poll.poll(10_000), "it was not told"
    frontend.close()


def test_sending_to_a_core_that_has_gone_waits_for_nobody() -> None:
    """The event loop that sends is the one that must learn of the end."""
    frontend = FrontendChannel()
    core = CoreChannel([frontend.address])
    frontend.seal()
    core.close()
    poll = select.poll()
    poll.register(frontend.gone_fileno(), select.POLLIN)
    while not frontend.core_is_gone():
        assert poll.poll(10_000), "nobody has noticed"
    while frontend._out.poll(0, zmq.POLLOUT):
        pass  # its other connection goes a moment later
    frontend.send(Call(client=0, call_id=1, method="ping"))
    frontend.close()
