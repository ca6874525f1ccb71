"""Reports of ZeroMQ's own thread about the connections of a socket."""

from __future__ import annotations

import zmq

Socket = zmq.Socket[bytes]


class Monitor:
    """The reports of one socket, for the thread that owns it.

    The thread that reports does all I/O of the context. Where reports have no room, it waits until
    some are read, with a lock that `close` needs. So there is room for any number: strangers at a
    port that nobody looks at must not stop the others, nor the end.
    """

    def __init__(self, socket: Socket, events: int) -> None:
        """Begin to listen for these events; before the socket is bound or connected."""
        self._socket = socket
        address = f"inproc://monitor-{int(socket.getsockopt(zmq.FD))}"
        socket.monitor(address, events)
        self._reports: Socket = socket.context.socket(zmq.PAIR)
        self._reports.setsockopt(zmq.RCVHWM, 0)
        self._reports.connect(address)

    def fileno(self) -> int:
        """Return a descriptor that is readable when `next_report` may have something.

        It is edge-triggered, as those of all ZeroMQ's sockets are.
        """
        return int(self._reports.getsockopt(zmq.FD))

    def next_report(self) -> list[bytes] | None:
        """Return the frames of the next report, or None."""
        if int(self._reports.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return self._reports.recv_multipart(zmq.NOBLOCK)
        return None

    def close(self) -> None:
        """Stop listening; before the socket is closed."""
        self._socket.disable_monitor()
        self._reports.close(linger=0)
