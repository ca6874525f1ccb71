"""torch for a process that computes: its shapes of tensors without memory are imported later.

The end of torch's import are functions in Python for the shapes of results, in the module
`torch._meta_registrations` and those that it imports. They take up to a fifth of the whole. Tensors
without memory, those on the `meta` device, need them, and so does torch's compiler. A worker has
neither. So they are imported when the compiler is, or when something asks for a name of the module.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from sidestep.ipc.processes.process import uncollected_imports

_SHAPES, _COMPILER = "torch._meta_registrations", "torch._dynamo"
_PART, _NEXT_TO_PART = "torch._prims", "torch.utils._content_store"
"""A package that the shapes need, and a module. They import each other, and one order works."""


def import_torch() -> None:
    """Import torch, if that has not been done, with the shapes of tensors without memory later."""
    if "torch" in sys.modules:
        return
    sys.meta_path.insert(0, _Finder())
    with uncollected_imports():
        import torch

        try:
            torch.Generator()
        except RuntimeError:  # since torch 2.13 it needs a part of the shapes' imports
            import torch._prims.rng_prims


class _Finder(MetaPathFinder):
    """Finds the module that is imported later, and imports it before those that need it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's spec with a loader that waits; None for other modules."""
        is_needed = fullname == _COMPILER or (
            fullname == _NEXT_TO_PART and _PART not in sys.modules
        )
        if is_needed and isinstance(later := sys.modules.get(_SHAPES), _Later):
            later.load()
        if fullname != _SHAPES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _LaterLoader(spec.loader)
        return spec


class _LaterLoader(Loader):
    """Makes a module that is empty until something asks for one of its names."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the empty module."""
        return _Later(spec.name, self._loader)

    def exec_module(self, module: ModuleType) -> None:
        """Leave it empty."""


class _Later(ModuleType):
    """A module that is empty until something asks for one of its names.

    In Python 3.11, importlib.util.LazyLoader has no lock, and other threads would see a part of it.
    """

    def __init__(self, name: str, loader: Loader) -> None:
        super().__init__(name)
        self.__dict__["_load_with"] = loader
        self.__dict__["_loading"] = threading.RLock()

    def load(self) -> None:
        """Import the module, unless it has been, or this thread does."""
        with self.__dict__["_loading"]:
            loader = self.__dict__.pop("_load_with", None)
            if loader is not None:
                loader.exec_module(self)
                object.__setattr__(self, "__class__", ModuleType)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.load()
        if isinstance(self, _Later):  # this thread is importing it
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} yet")
        return getattr(self, name)
