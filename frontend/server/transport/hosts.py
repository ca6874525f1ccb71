"""Host names that a server without keys accepts.

A page may make its own name resolve to this machine and then send requests to that name. For the
browser that is the page's own server, so `Origin` does not reveal it. Where only the address
protects the server, requests for unknown names are refused.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from sidestep.frontend.options.serve_options import ServerArgs


def is_loopback(host: str) -> bool:
    """Return whether only programs on this machine can reach this address or name."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def known_hosts(args: ServerArgs, keys: Collection[str]) -> frozenset[str] | None:
    """Return the names that a server answers to, beside those of this machine; None: any name."""
    allowed = args.allowed_hosts or []
    if keys or not is_loopback(args.host) or "*" in allowed:
        return None
    # Pages of an allowed origin may call this server in any case.
    origins = [origin.partition("://")[2] for origin in args.allowed_origins or ()]
    return frozenset(filter(None, (name_of(host) for host in (args.host, *allowed, *origins))))


def is_known(header: str, known: frozenset[str]) -> bool:
    """Return whether a Host header, with or without a port, names this machine or is in `known`."""
    name = name_of(header)
    return not header or (name is not None and (name in known or is_loopback(name)))


def name_of(host: str) -> str | None:
    """Return the name in 'name', 'name:port' or '[::1]:port' in lower case; None without a name."""
    try:
        if ipaddress.ip_address(host).version == 6:
            return host
    except ValueError:
        pass
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
