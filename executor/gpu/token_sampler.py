"""Sampling of a step's positions, and the advance of slots past the tokens that count.

Without speculation, the kernel that chooses a token also advances its slot. With it, tokens go to a
buffer, and another kernel accepts drafts, advances the slots and looks up their next drafts, also
in steps without drafts. Rows that are sampled apart always take the second way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sidestep.executor.gpu.cuda_graphs import most_queries
from sidestep.executor.gpu.device_tables import SAMPLING_WORDS, StepRows, draft_tables
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.model.speculative_config import SpeculativeConfig
from sidestep.ipc.step_limits import StepLimits
from sidestep.ipc.transport.step import Int32, StepOutput
from sidestep.kernels.launch import has_pdl
from sidestep.kernels.ops.speculation import AcceptedTokens
from sidestep.kernels.speculation.accept_triton import accept
from sidestep.kernels.speculation.ngram_triton import look_up_drafts
from sidestep.kernels.triton.prepare_step_triton import SlotTables
from sidestep.kernels.triton.sampling_triton import Taken, sample_tokens, scratch_size

ON_GPU = ("ngram",)
"""Methods of speculation whose drafts are made on a GPU."""


def pinned(rotation: int, count: int, device: torch.device) -> Tensor:
    """Return int32 [rotation, count] in host memory that the GPU reads and writes too."""
    where: dict[str, Any] = {"pin_memory": True} if device.type == "cuda" else {"device": device}
    return torch.zeros(rotation, count, dtype=torch.int32, **where)


def check_method(speculation: SpeculativeConfig | None) -> None:
    """Raise EngineStartError for a method of speculation that a GPU does not have."""
    if speculation is not None and speculation.method not in ON_GPU:
        raise EngineStartError(
            f"speculative_config: method {speculation.method!r} does not run on a GPU; "
            f"use {' or '.join(map(repr, ON_GPU))}"
        )


@dataclass(frozen=True)
class SampledRows:
    """The tokens of a step's rows in pinned memory, R rows that sample."""

    ids: Int32
    """[R, Q]"""
    sizes: Int32
    """[R] Tokens that count."""
    num_drafts: Int32
    """[R] Drafts that were verified."""
    held: Int32
    """[R] Drafts that the slot had."""
    hits: Int32
    """[R] Drafts that were right, also behind those that were verified."""

    def tell(self, output: StepOutput) -> None:
        """Add the tokens to a step's output."""
        width, accepted = self.ids.shape[1], self.sizes - 1
        if width == 1:
            output.token_ids = self.ids[:, 0]
        else:
            output.token_ids = self.ids[np.arange(width) < self.sizes[:, None]]
            output.sizes, output.num_drafts = self.sizes, self.num_drafts
        if not self.held.any():
            return
        missed = (accepted == self.num_drafts) & (self.held > self.num_drafts)
        output.num_unverified = int(missed.sum())
        output.num_unverified_right = int((missed & (self.hits > accepted)).sum())


class TokenSampler:
    """The sampler's memory, and the launches of its kernels."""

    def __init__(
        self,
        tables: SlotTables,
        limits: StepLimits,
        speculation: SpeculativeConfig | None,
        vocab_size: int,
        rotation: int,
    ) -> None:
        """Allocate the scratch memory and the pinned outputs."""
        device, queries = tables.progress.device, most_queries(limits)
        self._device = device
        self._parameters = tables.parameters
        self._tables = draft_tables(tables)
        self._speculation = speculation
        self._scratch = torch.empty(
            scratch_size(queries, vocab_size), dtype=torch.int32, device=device
        )
        self.sampled = torch.zeros(queries, dtype=torch.int32, device=device)
        """The tokens sampled at the queries of a step that has not advanced yet."""
        self._matches = torch.zeros(limits.num_slots, dtype=torch.int64, device=device)
        self.out = AcceptedTokens(
            pinned(rotation, queries, device),
            *(pinned(rotation, limits.max_num_seqs, device) for _ in range(4)),
        )
        self._host = [
            getattr(self.out, name).numpy() if device.type != "meta" else np.empty((0, 0), np.int32)
            for name in ("ids", "sizes", "drafts", "held", "hits")
        ]

    @property
    def speculates(self) -> bool:
        """Whether slots have drafts."""
        return self._speculation is not None

    # On the host.

    def begin_step(self, position: int, num_rows: int) -> None:
        """Let rows that no kernel will advance count as rows of one token.

        Their tokens are dropped, since their masks did not come.
        """
        if self.speculates:
            _, sizes, *counts = self._host
            sizes[position, :num_rows] = 1
            for column in counts:
                column[position, :num_rows] = 0

    def sampled_rows(
        self, position: int, samples: npt.NDArray[np.bool_], queries: int
    ) -> SampledRows:
        """Return what the rows that sample have, once the step has ended; [R] bool."""
        ids, *columns = self._host
        return SampledRows(
            ids[position, : len(samples) * queries].reshape(-1, queries)[samples],
            *(column[position, : len(samples)][samples] for column in columns),
        )

    # On the device.

    def sample_step(self, logits: Tensor, rows: StepRows) -> None:
        """Sample all queries of the rows that are not sampled apart, and advance these rows."""
        self.sample_plain(logits, rows, rows.query_samples)
        if self.speculates:
            self.advance(rows, rows.valid, rows.samples)

    def sample_plain(self, logits: Tensor, rows: StepRows, marks: Tensor) -> None:
        """Sample the marked queries. Without speculation their slots advance too."""
        out: Tensor | Taken = self.sampled
        if not self.speculates:
            out = Taken(self._tables.last_sampled, self._tables.num_computed, self.out.ids)
        self._sample(logits, rows.by_query, rows.query_slots, rows.query_lens, marks, out)

    def sample_copies(
        self, logits: Tensor, header: Tensor, slots: Tensor, lens: Tensor, marks: Tensor
    ) -> Tensor:
        """Return the tokens sampled from copies of logits; int32 [n] like the columns."""
        out = torch.empty_like(lens)
        self._sample(logits, header, slots, lens, marks, out)
        return out

    def advance(self, rows: StepRows, valid: Tensor, marks: Tensor) -> None:
        """Accept the drafts of marked rows, advance their slots and look up the next drafts.

        valid: int32 [R] Queries of each row that count.
        """
        tables = self._tables
        accept(
            self.sampled[: len(valid) * rows.queries],
            header=rows.by_row,
            valid=valid,
            slots=rows.slots,
            starts=rows.last_known,
            marks=marks,
            tables=tables,
            out=self.out,
        )
        if self._speculation is not None:
            least, most = self._speculation.lookup
            look_up_drafts(
                header=rows.by_row,
                slots=rows.slots,
                marks=marks,
                tables=tables,
                scratch=self._matches,
                min_match=least,
                max_match=most,
            )

    def _sample(
        self,
        logits: Tensor,
        header: Tensor,
        slots: Tensor,
        lens: Tensor,
        marks: Tensor,
        out: Tensor | Taken,
    ) -> None:
        sample_tokens(
            logits,
            header=header,
            slots=slots,
            seq_lens=lens,
            samples=marks,
            parameters=self._parameters,
            words=SAMPLING_WORDS,
            scratch=self._scratch,
            out=out,
            pdl=has_pdl(self._device),
        )
