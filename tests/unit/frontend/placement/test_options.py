"""Options of placement: a wrong one is an error that names it, before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from sidestep.frontend.options.node_options import NodeOptions
from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.placement_config import PlacementConfig
from sidestep.ipc.processes.addresses import new_remote_address, remove_address

JOIN = {"placer": "join", "head_address": "10.0.0.1:7000"}


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"placer": "nowhere"}, "placer"),
        ({"placer": "join"}, "head_address"),
        ({"head_address": "10.0.0.1:7000"}, "head_address"),
        ({"invitation_file": "file"}, "invitation_file"),
        ({"head_key_file": "file"}, "head_key_file"),
        ({**JOIN, "head_address": "10.0.0.1"}, "head_address"),
        ({**JOIN, "head_address": "10.0.0.1:x"}, "head_address"),
        ({**JOIN, "head_address": "0.0.0.0:7000"}, "head_address"),
        ({**JOIN, "placer_timeout": 0.0}, "placer_timeout"),
        ({**JOIN, "placer_timeout": float("inf")}, "placer_timeout"),
        ({**JOIN, "invitation_file": "a", "head_key_file": "b"}, "invitation_file"),
    ],
    ids=str,
)
def test_a_wrong_option_of_placement_is_named(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValidationError, match=f"^{name}: "):
        PlacementConfig(**options)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "head"),
        ({"head": "10.0.0.1"}, "head"),
        ({"head_key_file": "file"}, "head"),
        ({"head": "h:1", "head_key_file": "file", "invitation": "file"}, "invitation"),
        ({"invitation": "file", "max_replicas": 0}, "max_replicas"),
        ({"invitation": "file", "max_ranks": 0}, "max_ranks"),
        ({"invitation": "file", "wait": -1.0}, "wait"),
    ],
    ids=str,
)
def test_a_wrong_option_of_a_node_is_named(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValidationError, match=f"^{name}: "):
        NodeOptions(**options)


def test_an_address_shows_no_key() -> None:
    address = new_remote_address("127.0.0.1")
    assert address.is_remote and address.for_core.secret_key is None
    for key in (address.server_key, address.secret_key):
        assert key is not None and key not in repr(address)
    remove_address(address)
