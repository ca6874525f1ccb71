"""New weights for a running engine, in two calls.

The first reads them into the host's memory, and finds out all that may be wrong with the folder:
until then nothing has changed. The second puts them in the place of the old ones, between two
steps. So either all ranks get the new weights or none does.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import msgspec

from sidestep.executor.models.decoder import DecoderForCausalLM
from sidestep.executor.models.weight_memory import weights_of
from sidestep.executor.runner.runner import WorkerArgs
from sidestep.executor.runner.worker_calls import CallRefusedError
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.transport.worker_calls import (
    ApplyWeights,
    CallResult,
    DropWeights,
    PrepareWeights,
)


class Weights(Protocol):
    """The weights of a rank, which can be replaced."""

    def read_weights(self, args: WorkerArgs) -> DecoderForCausalLM:
        """Return a model in the host's memory. Raises EngineStartError, CallRefusedError."""

    def use_weights(self, model: DecoderForCausalLM, args: WorkerArgs) -> None:
        """Use the weights of this model, read with these arguments, from the next step on."""


class WeightCalls:
    """Answers the calls that bring new weights."""

    def __init__(self, weights: Weights, args: WorkerArgs) -> None:
        """Begin with the weights that the rank has loaded with these arguments."""
        self._weights = weights
        self._args = args
        self._prepared: tuple[DecoderForCausalLM, WorkerArgs] | None = None
        """A model with new weights, in the host's memory, and the arguments it was read with."""

    def prepare_weights(self, call: PrepareWeights) -> CallResult:
        """Read the weights of a folder into the host's memory, and check them."""
        self._prepared = None
        args = dataclasses.replace(
            self._args,
            spec=msgspec.structs.replace(self._args.spec, path=call.folder),
            model=dataclasses.replace(self._args.model, load_format="auto"),
        )
        try:
            self._prepared = self._weights.read_weights(args), args
        except EngineStartError as error:
            raise CallRefusedError(str(error)) from None
        except (OSError, RuntimeError, MemoryError) as error:
            raise CallRefusedError(f"{call.folder} cannot be read: {error}") from None
        return {"folder": call.folder}

    def apply_weights(self, call: ApplyWeights) -> CallResult:
        """Use the weights that were read from this folder."""
        if self._prepared is None or self._prepared[1].spec.path != call.folder:
            raise CallRefusedError(f"the weights of {call.folder} have not been read")
        self._weights.use_weights(*self._prepared)
        self._prepared = None
        return {}

    def drop_weights(self, call: DropWeights) -> CallResult:
        """Forget weights that were read and are not used."""
        self._prepared = None
        return {}


def check_same_weights(old: DecoderForCausalLM, new: DecoderForCausalLM) -> None:
    """Raise CallRefusedError, which names a weight, unless all can be copied from new to old."""
    before, after = weights_of(old), weights_of(new)
    if before.keys() != after.keys():
        path = sorted(before.keys() ^ after.keys())[0]
        raise CallRefusedError(f"only one of the old and the new weights has {path}")
    for path, tensor in before.items():
        if tensor.shape != after[path].shape or tensor.dtype != after[path].dtype:
            raise CallRefusedError(
                f"{path} is {list(tensor.shape)} {tensor.dtype}, and {list(after[path].shape)} "
                f"{after[path].dtype} in the new weights"
            )
    if len({id(t) for t in before.values()}) != len({id(t) for t in after.values()}):
        raise CallRefusedError("only one of the old and the new head equals the embedding")


def copy_weights(old: DecoderForCausalLM, new: DecoderForCausalLM) -> None:
    """Copy all weights of a model over those of another, after `check_same_weights`.

    The copies are queued behind the steps that were launched before.
    """
    after = weights_of(new)
    done = set[int]()
    for path, tensor in weights_of(old).items():
        if id(tensor) not in done:
            tensor.copy_(after[path])
            done.add(id(tensor))
