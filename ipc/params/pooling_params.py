"""Parameters of a request for a vector, checked where they are made."""

from __future__ import annotations

from typing import Any, Literal, Self

import msgspec

from sidestep.ipc.params.ranges import check, is_int
from sidestep.ipc.vllm.params import ParamsMeta, plain

PoolingType = Literal["last", "mean", "cls"]
"""Which tokens' states give a prompt's vector: the last token's, the mean of all tokens' states, or
the first token's."""
POOLING_TYPES: tuple[PoolingType, ...] = ("last", "mean", "cls")
PoolingTask = Literal["embed", "classify"]
"""Use of the vector: as an embedding, or as the input of the model's classification head."""
POOLING_TASKS: tuple[PoolingTask, ...] = ("embed", "classify")


class PoolingParams(
    msgspec.Struct,
    kw_only=True,
    frozen=True,
    array_like=True,
    forbid_unknown_fields=True,
    metaclass=ParamsMeta,
):
    """Parameters of one request to an engine with runner='pooling', with vLLM's names.

    They are frozen: `clone` makes a copy with other values. Raises ValidationError, which names the
    field, when a value is wrong or the name of a field is unknown.
    """

    dimensions: int | None = None
    """Length of the embedding: its first values, normalised again. None for all values.

    The model must be trained for it (Matryoshka representation learning).
    """
    use_activation: bool | None = None
    """Whether the result is normalised: an embedding to length 1, a head's outputs to
    probabilities. None for the model's own setting."""
    normalize: bool | None = None
    """Another name of `use_activation`, for embeddings."""
    task: PoolingTask | None = None
    """The task that the caller expects of the engine; another one is refused."""

    def __post_init__(self) -> None:
        dimensions = self.dimensions
        check(
            dimensions is None or (is_int(dimensions) and dimensions >= 1),
            "dimensions",
            f"must be a whole number of at least 1, not {dimensions!r}",
        )
        for name in ("use_activation", "normalize"):
            value = getattr(self, name)
            check(
                value is None or isinstance(value, bool),
                name,
                f"must be True or False, not {value!r}",
            )
        check(
            self.normalize is None or self.use_activation is None,
            "normalize",
            "means the same as use_activation; give one of them",
        )
        check(
            self.task is None or self.task in POOLING_TASKS,
            "task",
            f"must be {' or '.join(map(repr, POOLING_TASKS))}, not {self.task!r}",
        )

    @property
    def activation(self) -> bool | None:
        """`use_activation`, under either name."""
        return self.normalize if self.use_activation is None else self.use_activation

    def clone(self, **changes: Any) -> Self:
        """Return a copy with other values."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        return type(self)(**{**values, **plain(changes)})
