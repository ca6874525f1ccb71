"""The rows of a step as recurrent layers see them: their tokens, and their states.

A recurrent layer keeps one state a sequence, of a fixed size, instead of keys and values of each
token. States lie in tensors whose first dimension is the state row.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sidestep.kernels.recurrent.rows_in_c import RowsC

FEW_TOKENS = 8
"""Most tokens of a row that are computed one after the other. The number of a row's tokens alone
decides, so that a row's bits do not depend on other rows."""
CHUNK = 64
"""Tokens of a longer row that are computed together."""


@dataclass(frozen=True, kw_only=True)
class StateRows:
    """The R rows of a step, all tensors int32 on the device of the states.

    Row r has the tokens from query_starts[r] up to, but without, query_starts[r + 1]; a row that
    pads a step has none. Nothing is computed for tokens behind the last row.

    The last tokens of a row may be drafts, which a later step may find to be wrong. The tokens
    before them are settled. The state after the last settled token is written to state_out, and
    the state after each draft to the state row behind that of the token before.

    A state row that is written here may be read by the same row of the step (state_in among the
    rows from state_out on), and by no other one. Several rows may begin from the same state row.
    """

    query_starts: Tensor
    """[R + 1]"""
    state_in: Tensor
    """[R] State row that the row begins from; -1 for a new sequence, whose state is zero."""
    state_out: Tensor
    """[R] State row for the state after the row's last settled token; -1 for none."""
    settled: Tensor
    """[R] Tokens of the row that are no drafts: at least one, and all of more than FEW_TOKENS."""
    save_starts: Tensor
    """[R + 1] Index in S of each row's first save. A save is one more state that is written."""
    save_offsets: Tensor
    """[S] Tokens of the row, at least one, after which the state is saved; no more than are
    settled. They ascend in a row, and several may be equal."""
    save_rows: Tensor
    """[S] State row that each save is written to."""
    max_long_tokens: int
    """Most tokens, together, of rows with more than FEW_TOKENS; 0 if there are none."""
    max_long_rows: int
    """Most rows with more than FEW_TOKENS; 0 if there are none."""
    max_drafts: int = 0
    """Most drafts of a row, less than FEW_TOKENS."""

    place: RowsC | None = None
    """The place, the same for all steps, where kernels in C find the columns; None if there is no
    such place."""

    def in_c(self) -> RowsC:
        """Return where kernels in C find the columns, which are kept by these rows."""
        return self.place or RowsC().write(
            self.query_starts,
            self.state_in,
            self.state_out,
            self.settled,
            self.save_starts,
            self.save_offsets,
            self.save_rows,
        )

    @property
    def max_chunks(self) -> int:
        """Most chunks of rows with more than FEW_TOKENS."""
        return self.max_long_tokens // CHUNK + self.max_long_rows


@dataclass(frozen=True)
class StateRow:
    """One row of a step on the host."""

    tokens: slice
    """Its tokens among the step's."""
    state_in: int
    saves: tuple[tuple[int, int], ...]
    """Numbers of the row's tokens, ascending, and the state rows that are written after them."""

    @property
    def num_tokens(self) -> int:
        """The number of its tokens."""
        return int(self.tokens.stop - self.tokens.start)


def rows_on_host(rows: StateRows) -> list[StateRow]:
    """Return the rows that have tokens.

    The states after the last settled token and after each draft are saves too.
    """
    starts, first_saves = rows.query_starts.tolist(), rows.save_starts.tolist()
    saves = list(zip(rows.save_offsets.tolist(), rows.save_rows.tolist(), strict=True))
    found = []
    columns = rows.state_in.tolist(), rows.state_out.tolist(), rows.settled.tolist()
    for row, (begin, end, settled) in enumerate(zip(*columns, strict=True)):
        own = saves[first_saves[row] : first_saves[row + 1]]
        tokens = slice(starts[row], starts[row + 1])
        count = tokens.stop - tokens.start
        if count:
            ends = [(n, end + n - settled) for n in range(settled, count + 1) if end >= 0]
            found.append(StateRow(tokens, begin, (*own, *ends)))
    return found
