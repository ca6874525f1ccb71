"""The options of `sidestep node`, declared in one module like those of the engine."""

from __future__ import annotations

from dataclasses import dataclass

from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.common.options import Options, host_and_port, option, require, require_positive


@dataclass(frozen=True)
class NodeOptions(Options):
    """A host that joins an engine by `sidestep node`.

    Raises ValidationError, which names the option.
    """

    head: str | None = option(
        None,
        "HOST:PORT of the engine's program: its --head-address. Default: the one in the "
        "invitation.",
    )
    invitation: str | None = option(
        None,
        "The file that the engine's program writes (--invitation-file); it may come later. "
        "Default: sidestep/invitation-PORT.json in XDG_STATE_HOME, else in ~/.local/state.",
    )
    head_key_file: str | None = option(
        None,
        "The file with a secret text that the engine's program has too, in place of an invitation; "
        "with --head.",
    )
    name: str | None = option(None, "Name of this host. Default: the machine's.")
    address: str | None = option(
        None,
        "Address by which other hosts reach this one. Default: that of the way to the head.",
    )
    gpus: list[str] | None = option(
        None,
        "GPUs to offer, as names for CUDA_VISIBLE_DEVICES. Default: all that are visible.",
    )
    max_replicas: int | None = option(
        None, "Most replicas at once. Default: one for each GPU, and one without GPUs."
    )
    max_ranks: int | None = option(
        None,
        "Most ranks at once; a replica with more is spread over several hosts. Default: one for "
        "each GPU, and no limit without GPUs.",
    )
    wait: float = option(300.0, "Seconds to wait for the head at the start.")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "max_replicas", "max_ranks")
        require(self.wait >= 0, "wait", f"must be at least 0, not {self.wait!r}")
        require(
            self.head is not None or self.invitation is not None,
            "head",
            "must be given, or else the invitation",
        )
        if self.head_key_file is not None:
            require(self.invitation is None, "invitation", "has no meaning with head_key_file")
            require(self.head is not None, "head", "must be given with head_key_file")
        if self.head is not None:
            try:
                host_and_port(self.head)
            except ValueError as error:
                raise ValidationError("head", str(error)) from None
