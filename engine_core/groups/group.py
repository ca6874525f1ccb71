"""Requests that share the blocks of their prompt: the choices of a call, or the beams of a search.

Beams are in engine_core/groups/beams.py. The requests of a group are admitted and preempted
together. One of them, the group's source, computes the prompt; the others are *parked* until the
step that computes the prompt's last token has been scheduled. In the next step they enter with all
tokens of the prompt but the last computed. Their full blocks are the source's own. The last
block of the prompt, if it is not full, is copied from the source before that step writes anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from sidestep.engine_core.kv_cache.kv_cache_manager import KVCacheManager
from sidestep.engine_core.requests.life import RequestStatus
from sidestep.engine_core.requests.request import Group, Request
from sidestep.ipc.transport.messages import AddRequest, Beam


class ForkingGroups:
    """Groups whose forks wait for the prompt."""

    def __init__(self) -> None:
        self._groups: list[Group] = []

    def __repr__(self) -> str:
        return f"ForkingGroups({len(self._groups)})"

    def __contains__(self, group: Group) -> bool:
        return group in self._groups

    def enter(self, group: Group, together: Sequence[Request]) -> None:
        """Note that these have got their slots and blocks, and the first its first row."""
        group.enter(together)
        if group.forks:
            self._groups.append(group)

    def unpark(self, kv: KVCacheManager) -> None:
        """Unpark the forks whose prompt has been computed, or is computed by a step in flight."""
        for group in self._groups.copy():
            source = group.source
            assert source is not None
            if source.num_computed >= source.num_prompt:
                for request in group.forks:
                    request.unpark()
                    request.blocks.copy_hashes(source.blocks, kv.num_shared(request))
                self.stop(group)

    def share_windows(self, kv: KVCacheManager) -> None:
        """Give forks their blocks in groups with a window, once their prompt's last row is planned.

        Its source may have ended by the time when they are unparked.
        """
        for group in self._groups:
            source = group.source
            assert source is not None
            if source.num_computed >= source.num_prompt:
                for request in group.forks:
                    kv.fork_windows(source, request)

    def stop(self, group: Group) -> None:
        """Note that no member of the group waits for its prompt any more."""
        group.stop_forking()
        if group in self._groups:
            self._groups.remove(group)

    def check_invariants(self) -> None:
        """Raise AssertionError when the state contradicts itself."""
        for group in self._groups:
            assert group.source is not None and group.forks, "nobody is parked, or for nobody"
            assert all(
                r.parked and r.status is RequestStatus.RUNNING and not r.num_in_flight
                for r in group.forks
            )
            assert (
                group.source.status is RequestStatus.RUNNING
                or group.source.num_computed >= group.source.num_prompt
            )


def check_groups(
    requests: Iterable[Request], queue: Iterable[Request], forking: ForkingGroups
) -> None:
    """Raise AssertionError when the groups of these requests contradict themselves.

    requests: all that have not ended.
    """
    for request in queue:
        assert request.group is None or request is request.group.queued, (
            "not who stands for its group"
        )
    for request in requests:
        if (group := request.group) is None:
            assert not request.parked, f"{request} waits for nobody"
            continue
        if group.chooses_tokens:
            assert len({r.status is RequestStatus.RUNNING for r in group.members}) == 1, (
                "some beams of a search run, and some do not"
            )
        assert group.queued in group.waiting or not group.waiting, (
            "nobody stands for those that wait"
        )
        assert not group.forks or group in forking, "forks that nobody will unpark"
        assert request in group.forks or not request.parked or group.chooses_tokens, (
            f"{request} is parked"
        )


def make_choices(
    message: AddRequest,
    max_model_len: int,
    eos_token_ids: frozenset[int],
    kv: KVCacheManager,
    max_drafts: int,
) -> list[Request]:
    """Return the request of a message, or all of its choices.

    The requests of a group may become so long that all of them together fit in the cache. So a
    group alone can always run to its end, as a request alone can. max_drafts: most drafts of each
    in a step.
    """
    num = message.sampling.n
    requests = [
        Request.from_message(_one_choice(message, index), max_model_len, eos_token_ids, max_drafts)
        for index in range(num)
    ]
    if num > 1:
        join(Group(requests, requests[0]), kv)
    return requests


def join(group: Group, kv: KVCacheManager) -> None:
    """Let the members of a group know of it, and of the length that fits in the cache for all."""
    for request in group.members:
        request.join(group, kv.longest_of_group(request, len(group.members)))


def _one_choice(message: AddRequest, index: int) -> AddRequest:
    """Return the message that asks for one of the choices alone."""
    if message.sampling.n == 1:
        return message
    return msgspec.structs.replace(
        message,
        handle=message.handle + index,
        request_id=f"{message.request_id}/{index}",
        sampling=message.sampling.for_choice(index),
    )


def why_never(
    requests: Sequence[Request], max_model_len: int, max_num_seqs: int, field: str
) -> str | None:
    """Return why these requests can never run, or None if they can.

    field: name of the parameter that sets their number.
    """
    first, num = requests[0], len(requests)
    if not first.num_prompt:
        return "prompt: is empty"
    if first.pooling is not None and first.num_prompt > max_model_len:
        return f"prompt: {first.num_prompt} tokens are more than the {max_model_len} that fit"
    if first.pooling is None and first.num_prompt >= max_model_len:
        return (
            f"prompt: {first.num_prompt} tokens and one of output are more than the "
            f"{max_model_len} that fit"
        )
    if num > max_num_seqs:
        return f"{field}: {num} are more than the {max_num_seqs} that run at once (max_num_seqs)"
    if first.num_prompt < len(first.token_ids) >= first.max_total:
        num = len(first.token_ids) - first.num_prompt
        return f"output_token_ids: {num} leave no room for another one"
    if first.max_total <= first.num_prompt:
        return (
            f"{field}: {num} continuations of {first.num_prompt} tokens do not fit in the KV cache "
            "together"
        )
    return None


def entering_with(request: Request) -> list[Request]:
    """Return a waiting request and all that must enter with it, the queued one first."""
    group = request.group
    if group is None:
        return [request]
    assert group.queued is not None
    return [group.queued, *(r for r in group.waiting if r is not group.queued)]


def ending_with(request: Request) -> list[Request]:
    """Return a request and all that end with it, in the order in which they are stopped."""
    return [request] if request.group is None else request.group.ending_with(request)


def found_by(request: Request) -> list[Beam]:
    """Return the beams that a search has found so far; none for a request that is not a search."""
    return [] if request.group is None else request.group.result(request.eos_ids)


def sharing(together: Sequence[Request]) -> Sequence[Request]:
    """Return what Group.sharing returns; nothing for a request without a group."""
    group = together[0].group
    return () if group is None else group.sharing(together)
