"""Parameters of requests for vectors, under the name of vLLM's module."""

from sidestep.ipc.params.pooling_params import PoolingParams

__all__ = ["PoolingParams"]

# The finder in sidestep/__init__.py answers for names that this module lacks.
__path__: list[str] = []
