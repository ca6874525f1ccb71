"""Ownership of an engine by the process that started it, when that process forks.

A forked child has copies of everything: the pipes whose end would end the engine, the sockets, and
objects whose threads exist in the parent only. The child closes its copies of the descriptors at
once, so that the engine still ends with the parent. Each object has a `Home`, which shows whether
the object is a copy in a forked child. The engine itself does not notice a fork.
"""

from __future__ import annotations

import os
import select
import selectors
import socket
import stat
import threading
import weakref
from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from sidestep.ipc.common.errors import SidestepError

if TYPE_CHECKING:
    import asyncio


class Kept(Protocol):
    """An object with descriptors that a forked child must not keep open."""

    def leave_to_parent(self) -> None:
        """Close this process's copies. Runs in a forked child, where no lock may be waited for."""


_kept: weakref.WeakSet[Kept] = weakref.WeakSet()
no_forks = threading.RLock()
"""Held while descriptors are opened or closed; a fork in another thread waits for it."""


def keep_from_children(kept: Kept) -> None:
    """Let a forked child close its copies of this object's descriptors."""
    with no_forks:
        _kept.add(kept)


def _after_fork_in_child() -> None:
    for kept in list(_kept):
        kept.leave_to_parent()
    _kept.clear()
    no_forks.release()


os.register_at_fork(
    before=no_forks.acquire, after_in_parent=no_forks.release, after_in_child=_after_fork_in_child
)


def close_sockets_of(places: Collection[str | tuple[str, int]]) -> None:
    """Close this process's sockets that are bound to these places, and their accepted connections.

    places: paths of socket files, and addresses with ports.

    The library that opened them does not give their descriptors.
    """
    for descriptor in map(int, os.listdir("/dev/fd")):
        with suppress(OSError):  # the listing's own descriptor is closed by now
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode) and _bound_to(descriptor) in places:
                os.close(descriptor)


def _bound_to(descriptor: int) -> object:
    """Return the address that a socket is bound to.

    For an accepted connection, it is the address of the listening socket.
    """
    held = socket.socket(fileno=descriptor)
    try:
        name = held.getsockname()
        return name[:2] if isinstance(name, tuple) else name
    finally:
        held.detach()


class KeptLoop:
    """An event loop that the engine runs on.

    A forked child can only leave its copy of a running loop, and leaving must not disturb the
    parent. Copies of one epoll descriptor share what they watch, so the child would make the
    parent's loop miss events; and the child would wait for threads that only the parent has.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop: Any = loop
        keep_from_children(self)

    def leave_to_parent(self) -> None:
        """Give the child's copy of the loop an epoll descriptor that watches nothing.

        The copy gets no executor either.
        """
        try:
            self._loop.set_default_executor(None)
        except TypeError:  # asyncio's own loop has no public way
            self._loop._default_executor = None
        shared = _epoll_of(self._loop)
        if shared is not None:
            with select.epoll() as new:
                os.dup2(new.fileno(), shared, inheritable=False)


def _epoll_of(loop: Any) -> int | None:
    """Return the loop's epoll descriptor; None for a closed loop, or a loop without epoll.

    Neither kind of loop has a public way to get it.
    """
    if loop.is_closed() or not hasattr(select, "epoll"):
        return None
    selector = getattr(loop, "_selector", None)
    if selector is not None:
        return selector.fileno() if isinstance(selector, selectors.EpollSelector) else None
    return int(loop._get_backend_id()) if hasattr(loop, "_get_backend_id") else None  # uvloop's


class Home:
    """The process that an object was made in."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this process made the object, and not the parent of this forked process."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise SidestepError in a forked child."""
        if not self.is_here:
            raise SidestepError(
                f"this engine belongs to process {self._pid}, and a forked child "
                "cannot use it: make the engine after the fork"
            )
