"""The entries of a core's requests in its black box: who was there when the core died."""

from __future__ import annotations

from sidestep.ipc.transport.black_box import MOST_REQUESTS, BlackBox, NotedRequest
from sidestep.ipc.transport.envelope import handles_of
from sidestep.ipc.transport.messages import AddRequest, Outputs


class RequestNotes:
    """Writes an entry when a request comes, and removes it when the last of its choices ends."""

    def __init__(self, box: BlackBox) -> None:
        """Begin without requests."""
        self._box = box
        self._free = list(range(MOST_REQUESTS - 1, -1, -1))
        self._entries: dict[tuple[int, int], int] = {}
        """By frontend and handle of a choice: the index of its request's entry."""
        self._live: dict[int, int] = {}
        """By index: the number of choices that have not ended."""

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self._live)

    def __repr__(self) -> str:
        return f"RequestNotes({len(self)} requests, {len(self._entries)} choices)"

    def came(self, message: AddRequest) -> None:
        """Note a new request, if there is room.

        A request that has waited for a call comes again when the call has ended.
        """
        handles = handles_of(message)
        if not self._free or (message.client, handles[0]) in self._entries:
            return
        at = self._free.pop()
        self._box.put_request(
            at,
            NotedRequest(
                request_id=message.request_id,
                frontend=message.client,
                num_choices=len(handles),
                num_prompt_tokens=len(message.prompt_token_ids) // 4,
                arrival_ns=int(message.arrival * 1e9),
                scheduled_ns=None,
            ),
        )
        self._live[at] = len(handles)
        for handle in handles:
            self._entries[message.client, handle] = at

    def take(self, client: int, outputs: Outputs) -> None:
        """Note which of a frontend's choices have begun, and which have ended."""
        for started in outputs.started:
            if (at := self._entries.get((client, started.handle))) is not None:
                self._box.began(at, int(started.scheduled * 1e9))
        for finished in outputs.finished:
            self.end(client, finished.handle)

    def end(self, client: int, handle: int) -> None:
        """Note the end of a choice; nothing happens if it is unknown."""
        if (at := self._entries.pop((client, handle), None)) is None:
            return
        self._live[at] -= 1
        if not self._live[at]:
            del self._live[at]
            self._box.remove_request(at)
            self._free.append(at)

    def client_left(self, client: int) -> None:
        """Note the end of all that a frontend has asked for."""
        for one, handle in [key for key in self._entries if key[0] == client]:
            self.end(one, handle)
