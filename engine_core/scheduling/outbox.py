"""Messages of a step from the core to its frontends: collected for each, sent as one."""

from __future__ import annotations

from dataclasses import dataclass, field

from sidestep.ipc.transport.messages import Finished, Outputs, Started, pack_ids


@dataclass(slots=True)
class Outbox:
    """The next message for one frontend."""

    handles: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    logprobs: bytes = b""
    prompt_logprobs: bytes = b""
    pooled: list[int] = field(default_factory=list)
    vectors: list[bytes] = field(default_factory=list)

    def message(self) -> Outputs:
        """Return all of it as one message."""
        return Outputs(
            handles=pack_ids(self.handles),
            token_ids=pack_ids(self.tokens),
            started=self.started,
            finished=self.finished,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            pooled=pack_ids(self.pooled) if self.pooled else b"",
            vectors=b"".join(self.vectors),
        )


class Outboxes:
    """One outbox for each frontend that has something to get, by the frontend's number."""

    def __init__(self) -> None:
        self._boxes: dict[int, Outbox] = {}

    def __repr__(self) -> str:
        return f"Outboxes(of {sorted(self._boxes)})"

    def of(self, client: int) -> Outbox:
        """Return the outbox of a frontend."""
        box = self._boxes.get(client)
        if box is None:
            box = self._boxes[client] = Outbox()
        return box

    def take(self) -> dict[int, Outputs]:
        """Empty all outboxes, and return their messages by client."""
        boxes, self._boxes = self._boxes, {}
        return {client: box.message() for client, box in boxes.items()}
