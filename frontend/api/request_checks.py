"""Checks of a request against the engine's options, made before it is sent."""

from __future__ import annotations

from sidestep.ipc.common.errors import QueueFullError, ValidationError
from sidestep.ipc.frontend_config import FrontendConfig
from sidestep.ipc.model.pooling_spec import PoolingSpec


def check_priority(priority: object, scheduling_policy: str) -> None:
    """Raise ValidationError for a priority that the scheduling policy would ignore."""
    if priority and scheduling_policy != "priority":
        raise ValidationError(
            "priority",
            "counts only with the engine's option scheduling_policy='priority'; this "
            "one takes requests in the order in which they come",
        )


def check_task(spec: PoolingSpec | None, *, pools: bool) -> None:
    """Raise ValidationError for a request that this kind of engine does not serve.

    spec: the engine's vectors; None if it generates text. pools: whether the request is for one.
    """
    if spec is None and pools:
        raise ValidationError(
            "runner", "this engine generates text; for vectors start one with --runner pooling"
        )
    if spec is not None and not pools:
        raise ValidationError(
            "runner",
            "this engine makes vectors of prompts (--runner pooling) and generates no text",
        )


def check_queue(
    limits: FrontendConfig, num_waiting: int, num_waiting_tokens: int, num: int, num_tokens: int
) -> None:
    """Raise QueueFullError if the waiting requests leave no room for these.

    num, num_tokens: choices of the new request, and tokens of its prompt. A request that is larger
    than the limits by itself may wait alone, or it could never run.
    """
    most, most_tokens = limits.max_num_queued_reqs, limits.max_num_queued_tokens
    if most is not None and num_waiting and num_waiting + num > most:
        raise QueueFullError(
            f"{num_waiting} requests wait already; {most} may (max_num_queued_reqs)"
        )
    if most_tokens is not None and num_waiting and num_waiting_tokens + num_tokens > most_tokens:
        raise QueueFullError(
            f"prompts of {num_waiting_tokens} tokens wait already; with {num_tokens} more "
            f"they would be above {most_tokens} (max_num_queued_tokens)"
        )
