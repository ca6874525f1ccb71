"""The choice of an engine's router, by its options."""

from __future__ import annotations

from collections.abc import Mapping

from sidestep.frontend.routing.router import Router
from sidestep.ipc.common import registry
from sidestep.ipc.config import EngineConfig


def make_router(config: EngineConfig, num_blocks: Mapping[int, int], block_size: int) -> Router:
    """Return the router of an engine, for replicas that are all idle.

    num_blocks: the number of KV blocks of `block_size` tokens that each replica has, by the
    replica's number.
    """
    name = config.frontend.routing
    if config.parallel.most_replicas == 1:
        name = "round_robin"  # there is nothing to weigh
    elif name == "prefix" and not config.cache.enable_prefix_caching:
        name = "least_loaded"
    router: Router = registry.load(registry.ROUTERS[name])(num_blocks, block_size)
    return router
