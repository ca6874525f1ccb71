"""Messages to the service manager that started the server, by the protocol of sd_notify.

systemd waits with whatever depends on the server until it is ready, and restarts it when the
watchdog gets no message. A message is one datagram to a socket that the environment names.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

from sidestep.ipc.common.errors import EngineDeadError, EngineStalledError
from sidestep.ipc.config import service_manager_of_environment

logger = logging.getLogger(__name__)


class ServiceManager:
    """A service manager; without one, nothing is sent."""

    def __init__(self, address: str | None, watchdog_s: float | None) -> None:
        """Note where messages go, and send none.

        address: path of a socket, or `@` and the name of an abstract one; None without a service
        manager. watchdog_s: seconds after which the watchdog acts if it gets no message; None
        without a watchdog.
        """
        is_abstract = address is not None and address.startswith("@")
        self._address = f"\0{address[1:]}" if address and is_abstract else address
        self._watchdog_s = watchdog_s

    @classmethod
    def of_environment(cls) -> ServiceManager:
        """Return the service manager that the environment names."""
        return cls(*service_manager_of_environment())

    def ready(self) -> None:
        """Report that the server takes requests."""
        self._send("READY=1")

    def stopping(self) -> None:
        """Report that the server's end has begun."""
        self._send("STOPPING=1")

    async def feed_watchdog(self, check: Callable[[], Awaitable[object]]) -> None:
        """Tell the watchdog twice in its time that the server is alive, while `check` returns.

        check: raises EngineDeadError or EngineStalledError if it is not. Never returns while there
        is a watchdog.
        """
        if self._address is None or self._watchdog_s is None:
            return
        is_fed = True
        while True:
            try:
                await check()
            except (EngineDeadError, EngineStalledError) as error:
                if is_fed:
                    logger.error("the watchdog of the service manager gets no message: %s", error)
                is_fed = False
            else:
                is_fed = True
                self._send("WATCHDOG=1")
            await asyncio.sleep(self._watchdog_s / 2)

    def _send(self, message: str) -> None:
        """Send a message. A service manager that is gone does not end the server."""
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)
                sender.sendto(message.encode(), self._address)
        except OSError as error:
            logger.warning("the service manager did not get %s: %s", message, error)
