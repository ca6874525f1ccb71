"""The memory of a model's weights: found, counted, moved to the host and back.

A model is a tree of plain objects, with tensors as attributes. So the weights of every model are
found, also of one from another package, without a list that it would have to keep.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from sidestep.executor.layers.layouts.layout import OpaqueWeight
from sidestep.executor.parallel.parallel_state import Parallel


def weights_of(model: object) -> dict[str, Tensor]:
    """Return all tensors of a model by the paths of their attributes, in the order of building.

    A tensor that has several paths is under each of them. The memory that ranks share belongs to
    `Parallel`, and is no weight. Nor are weights in memory of a library, of which a CPU has some.
    """
    return {
        path: found for path, found in _walk(model, "model", set()) if isinstance(found, Tensor)
    }


def weight_bytes(model: object) -> int:
    """Return the bytes that the weights of a model take now; those that are freed take none."""
    return sum(
        weight.nbytes
        for weight in {id(found): found for _, found in _walk(model, "model", set())}.values()
        # A weight that oneDNN has packed has no storage that torch knows.
        if isinstance(weight, OpaqueWeight) or weight.is_mkldnn or weight.untyped_storage().nbytes()
    )


def _walk(thing: Any, path: str, above: set[int]) -> Iterator[tuple[str, Tensor | OpaqueWeight]]:
    """Yield the weights below an object. above: ids of the objects on the way to it."""
    if isinstance(thing, Tensor | OpaqueWeight):
        yield path, thing
    elif isinstance(thing, Parallel | type) or id(thing) in above:
        return
    elif isinstance(thing, list | tuple):
        for index, part in enumerate(thing):
            yield from _walk(part, f"{path}.{index}", above | {id(thing)})
    elif isinstance(thing, dict):
        for key, part in thing.items():
            yield from _walk(part, f"{path}.{key}", above | {id(thing)})
    else:
        for name, part in getattr(thing, "__dict__", {}).items():
            yield from _walk(part, f"{path}.{name}", above | {id(thing)})


class HostCopy:
    """A copy of tensors' memory in the host's memory, from which it can be restored.

    The tensors stay the same objects. Their addresses change, so whatever has kept an address, such
    as a captured graph, must be made again.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Copy the memory of all tensors, once where several share it.

        Raises RuntimeError if the host has too little memory; then nothing has changed.
        """
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        self._copies = [
            (storage, torch.UntypedStorage(storage.nbytes()).copy_(storage))
            for storage in storages.values()
            if storage.nbytes()
        ]

    def __repr__(self) -> str:
        return f"HostCopy({self.num_bytes} bytes)"

    @property
    def num_bytes(self) -> int:
        """Size of the memory that is copied."""
        return sum(copy.nbytes() for _, copy in self._copies)

    def free(self) -> None:
        """Free the tensors' own memory. They must not be used until `restore`."""
        for storage, _ in self._copies:
            storage.resize_(0)

    def restore(self) -> None:
        """Allocate the tensors' memory again, and fill it."""
        for storage, copy in self._copies:
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
