"""The options that say on which hosts an engine's processes run: declared and checked here."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.common.options import Options, host_and_port, option, require
from sidestep.ipc.common.registry import PLACERS


@dataclass(frozen=True)
class PlacementConfig(Options):
    """The hosts of an engine's replicas."""

    placer: str = option(
        "local",
        "Where the processes of the replicas start: 'local' starts them on this machine; 'join' "
        "on the hosts that have joined by sidestep node; 'ray' on nodes of a Ray cluster.",
        choices=tuple(PLACERS),
    )
    head_address: str | None = option(
        None,
        "With placer 'join' or 'ray': HOST:PORT at which this program listens for other hosts, and "
        "by which they reach it, over IPv4. Port 0 takes a free one, as is the default with 'ray'.",
    )
    invitation_file: str | None = option(
        None,
        "With placer 'join': file that this program writes for sidestep node, with the secret key "
        "by which hosts join. Default: sidestep/invitation-PORT.json in XDG_STATE_HOME, else in "
        "~/.local/state.",
    )
    head_key_file: str | None = option(
        None,
        "With placer 'join': file with a secret text of at least 32 characters, which hosts share "
        "where they cannot read the invitation. Default: a fresh key at each start.",
    )
    placer_timeout: float = option(
        300.0,
        "With placer 'join' or 'ray': seconds that the replicas wait at the start for hosts with "
        "room.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            0 < self.placer_timeout < math.inf,
            "placer_timeout",
            f"must be a number of seconds above 0, not {self.placer_timeout!r}",
        )
        is_join = self.placer == "join"
        for name, has_meaning in (
            ("head_address", is_join or self.placer == "ray"),
            ("invitation_file", is_join),
            ("head_key_file", is_join),
        ):
            is_given = getattr(self, name) is not None
            require(
                has_meaning or not is_given, name, f"has no meaning with placer {self.placer!r}"
            )
        require(
            self.invitation_file is None or self.head_key_file is None,
            "invitation_file",
            "has no meaning with head_key_file: hosts have the key already",
        )
        if self.head_address is not None:
            try:
                host, _ = host_and_port(self.head_address)
            except ValueError as error:
                raise ValidationError("head_address", str(error)) from None
            require(
                host not in ("0.0.0.0", "*"),
                "head_address",
                f"must be an address by which other hosts reach this one, not {host}",
            )
        require(
            not is_join or self.head_address is not None,
            "head_address",
            "must be given with placer 'join': the HOST:PORT by which other hosts reach this one",
        )
