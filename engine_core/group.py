"""Requests that belong together: the choices of one call, which share the blocks of its prompt.

They are admitted and preempted together. One of them, the group's source, computes the prompt; the others are *parked*
until the step that computes the prompt's last token has been scheduled. In the next step they enter with all tokens of
the prompt but the last computed: full blocks are the source's own, and what the source has written to the block that is
not full is copied before that step writes anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from sidestep.engine_core.kv_cache_manager import KVCacheManager
from sidestep.engine_core.request import Request, Status
from sidestep.ipc.messages import AddRequest


@dataclass(slots=True, eq=False)
class Group:
    """`members` are those that have not ended, in the order of their indices."""

    members: list[Request] = field(default_factory=list)
    source: Request | None = None
    """Who computes the prompt for the members that are parked; None when nobody is."""

    @property
    def waiting(self) -> list[Request]:
        """Those that enter together. The first stands in the queue for all."""
        return [r for r in self.members if r.status in (Status.WAITING, Status.PREEMPTED)]

    @property
    def parked(self) -> list[Request]:
        """Those that have slot and blocks, and wait for the prompt."""
        return [r for r in self.members if r.parked]


def make_requests(message: AddRequest, max_model_len: int, eos_token_ids: frozenset[int],
                  kv: KVCacheManager) -> list[Request]:
    """The request of a message, or all of its group. Those of a group may become so long that all of them together fit
    in the cache: a group alone can always run to its end, as a request alone can."""
    num = message.sampling.n
    requests = [Request.from_message(_one_choice(message, index), max_model_len, eos_token_ids) for index in range(num)]
    if num > 1:
        group = Group(requests)
        for request in requests:
            request.group = group
            request.max_total = min(request.max_total, kv.longest_of_group(request, num))
    return requests


def _one_choice(message: AddRequest, index: int) -> AddRequest:
    """The message that asks for one of the choices alone."""
    if message.sampling.n == 1:
        return message
    return msgspec.structs.replace(message, handle=message.handle + index, request_id=f"{message.request_id}/{index}",
                                   sampling=message.sampling.for_choice(index))


def why_never(requests: Sequence[Request], max_model_len: int, max_num_seqs: int) -> str | None:
    """Why these can never run, or None if they can."""
    first, num = requests[0], len(requests)
    if not first.num_prompt:
        return "prompt: is empty"
    if first.num_prompt >= max_model_len:
        return f"prompt: {first.num_prompt} tokens and one of output are more than the {max_model_len} that fit"
    if num > max_num_seqs:
        return f"n: {num} choices are more than the {max_num_seqs} requests that run at once (max_num_seqs)"
    if first.max_total <= first.num_prompt:
        return f"n: {num} choices of a prompt of {first.num_prompt} tokens do not fit in the KV cache together"
    return None


def entering_with(request: Request) -> list[Request]:
    """A waiting request and all that must enter with it; the first stands in the queue for them."""
    return [request] if request.group is None else request.group.waiting
