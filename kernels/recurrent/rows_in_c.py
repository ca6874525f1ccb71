"""The rows of a step as kernels in C find them."""

from __future__ import annotations

from ctypes import Structure, c_int64, c_void_p

from torch import Tensor


class RowsC(Structure):
    """Where the columns of StateRows are: `Rows` in kernels/native/source/recurrent.c."""

    _fields_ = (
        ("rows", c_int64),
        *((name, c_void_p) for name in ("starts", "state_in", "state_out", "settled")),
        *((name, c_void_p) for name in ("save_starts", "save_offsets", "save_rows")),
    )

    def write(
        self,
        query_starts: Tensor,
        state_in: Tensor,
        state_out: Tensor,
        settled: Tensor,
        save_starts: Tensor,
        save_offsets: Tensor,
        save_rows: Tensor,
    ) -> RowsC:
        """Write where these columns are, which must be kept meanwhile. Return this structure."""
        self.rows = len(state_in)
        self.starts, self.state_in = query_starts.data_ptr(), state_in.data_ptr()
        self.state_out, self.settled = state_out.data_ptr(), settled.data_ptr()
        self.save_starts, self.save_offsets = save_starts.data_ptr(), save_offsets.data_ptr()
        self.save_rows = save_rows.data_ptr()
        return self
