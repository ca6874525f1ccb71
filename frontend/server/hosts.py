"""Which names a server without keys answers to.

A page may make its own name resolve to this machine and then ask by that name: for the browser that is the page's own
server, so no `Origin` tells it apart. Where nothing but the address keeps others out, requests for unknown names are
refused.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from sidestep.frontend.server.options import ServerArgs


def is_loopback(host: str) -> bool:
    """Tell whether only programs on this machine reach this address or name."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def known_hosts(args: ServerArgs, keys: Collection[str]) -> frozenset[str] | None:
    """Return the names besides those of this machine that a server answers to; None: any."""
    allowed = args.allowed_hosts or []
    if keys or not is_loopback(args.host) or "*" in allowed:
        return None
    # Pages of an allowed origin may call this server in any case.
    origins = [origin.partition("://")[2] for origin in args.allowed_origins or ()]
    return frozenset(filter(None, (name_of(host) for host in (args.host, *allowed, *origins))))


def is_known(header: str, known: frozenset[str]) -> bool:
    """Tell whether a Host header, with or without a port, names this machine or one of these."""
    name = name_of(header)
    return not header or (name is not None and (name in known or is_loopback(name)))


def name_of(host: str) -> str | None:
    """Return the name in 'name', 'name:port' or '[::1]:port', in small letters; None if there is none."""
    try:
        if ipaddress.ip_address(host).version == 6:
            return host
    except ValueError:
        pass
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
