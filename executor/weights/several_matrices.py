"""Small matrices of one shape that are loaded together.

Where they are rounded while they load, starting the operations takes longer than their arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

from sidestep.executor.weights.weight_loader import Matrix, Wanted, Weights


def several(
    weights: Weights,
    names: Sequence[str],
    shape: tuple[int, int],
    rows: range | None = None,
    columns: range | None = None,
) -> Sequence[Matrix]:
    """Return matrices of one shape, each as `Weights.matrix` gives it."""
    if weights.matrices is not None:
        part = rows or range(shape[0]), columns or range(shape[1])
        wanted = [Wanted(name, shape, *part) for name in names]
        if (found := weights.matrices.together(weights, wanted)) is not None:
            return found
    return [weights.matrix(name, shape, rows, columns) for name in names]


def are_rounded(weights: Weights) -> bool:
    """Return whether matrices are rounded while they load, and have memory."""
    matrices = weights.matrices
    return matrices is not None and matrices.rounds and weights.device.type != "meta"
