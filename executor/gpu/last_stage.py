"""The part of a GPU's runner that only the last stage has: rows that are not plain, and results."""

from __future__ import annotations

from torch import Tensor

from sidestep.executor.gpu.apart_rows import ApartRows, QueryLogprobs
from sidestep.executor.gpu.cuda_graphs import most_queries
from sidestep.executor.gpu.device_tables import StepRows
from sidestep.executor.gpu.gpu_output import StepResult
from sidestep.executor.gpu.gpu_setup import GpuSetup, StepMemory
from sidestep.executor.runner.input_batch import Apart, HostBatch
from sidestep.executor.runner.transfer import to_host
from sidestep.executor.sampling.prompt_logprobs import PromptTokens
from sidestep.executor.sampling.special_rows import make_special_rows
from sidestep.executor.sampling.token_logprobs import Logprobs
from sidestep.ipc.transport.step import StepInput, StepMasks
from sidestep.kernels.triton.prepare_step_triton import NUM_DRAFTS


class LastStage:
    """Finds the rows that a step samples apart, and samples them."""

    def __init__(self, setup: GpuSetup, memory: StepMemory) -> None:
        """Begin without requests. Raises EngineStartError."""
        assert memory.sampler is not None
        limits = setup.limits
        self._speculates = bool(limits.num_drafts)
        self._vocab_size = setup.args.spec.vocab_size
        self._tables = memory.tables
        self.sampler = memory.sampler
        self.special = make_special_rows(setup.args, limits, setup.device)
        self._apart = ApartRows(
            self.special, self.sampler, memory.tables, setup.rotation, most_queries(limits)
        )

    def find(self, step: StepInput, batch: HostBatch) -> tuple[Apart | None, PromptTokens | None]:
        """Take the step's requests in, and return what is apart from its plain rows.

        These are the rows that are sampled apart, and prompt tokens with requested logprobs.
        """
        self.special.enter(step)
        if self._speculates and len(step.entering):
            slots = step.entering["slot"]
            batch.state.records["max_drafts"][slots[self.special.without_drafts[slots]]] = 0
        return self.special.find(batch), self.special.find_prompts(batch)

    def sample(
        self,
        logits: Tensor,
        batch: HostBatch,
        apart: Apart | None,
        masks: StepMasks | None,
        rows: StepRows,
        position: int,
        about_prompts: list[Logprobs],
    ) -> StepResult:
        """Sample the rows that the step has left out; return where all of its results will be.

        logits: as the step has left them. masks: have been taken. position: of the step's buffers.
        """
        logprobs: list[QueryLogprobs] = []
        if apart is not None:
            count = len(batch.slots) * rows.queries
            logprobs = self._apart.run(
                logits[:count, : self._vocab_size], batch, apart, rows, position
            )
        drafts = None
        if self._speculates and masks is not None:  # the next masks depend on them
            self._apart.force_drafts(masks.forced_by_row(), rows)
            progress = self._tables.progress.index_select(0, rows.slots)
            drafts = to_host(progress[:, NUM_DRAFTS:].contiguous())
        return StepResult(
            self.sampler, position, batch.samples, rows.queries, logprobs, about_prompts, drafts
        )
