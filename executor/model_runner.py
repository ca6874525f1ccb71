"""Runs a model's steps on one rank: tables, layout, model, sampler.

On the CPU a step is done when `execute` returns. On a GPU `execute` only launches: the sampled ids go to pinned memory
on a second stream, and whoever waits for them is not this thread.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from sidestep.executor.attention.base import AttentionBackend
from sidestep.executor.base import WorkerReady
from sidestep.executor.input_batch import HostBatch, make_batch
from sidestep.executor.kv_cache_size import num_kv_blocks
from sidestep.executor.layers.rotary import RotaryTable
from sidestep.executor.models.decoder import DecoderForCausalLM, attention_shape
from sidestep.executor.parallel_state import Parallel
from sidestep.executor.request_state import RequestState
from sidestep.executor.runner import DoneOutput, PendingOutput, Runner, WorkerArgs
from sidestep.executor.sampler import Sampler
from sidestep.executor.weight_loader import DummyWeights, SafetensorsWeights
from sidestep.ipc import registry
from sidestep.ipc.errors import EngineStartError
from sidestep.ipc.step import Int64, StepInput, StepOutput


class GpuOutput(PendingOutput):
    """A step's ids on their way to pinned memory."""

    def __init__(self, step_id: int, token_ids: Tensor, started: torch.cuda.Event, done: torch.cuda.Event,
                 launched_ns: int) -> None:
        self._step_id = step_id
        self._token_ids = token_ids
        self._started = started
        self._done = done
        self._launched_ns = launched_ns

    @property
    def ready(self) -> bool:
        return bool(self._done.query())

    def wait(self) -> StepOutput:
        self._done.synchronize()
        end = time.monotonic_ns()
        start = max(self._launched_ns, end - int(self._started.elapsed_time(self._done) * 1e6))
        return StepOutput(self._step_id, start, end, self._token_ids.numpy().astype(np.int32))


class ModelRunner(Runner):
    """A torch model on a CPU or a GPU."""

    def __init__(self, args: WorkerArgs) -> None:
        self._args = args
        self._device = pick_device(args)
        self._dtype = pick_dtype(args, self._device)
        self._parallel = Parallel(args.rank, args.parallel.tensor_parallel_size, rendezvous=args.rendezvous,
                                  cuda=self._device.type == "cuda")

    @torch.inference_mode()
    def load(self) -> WorkerReady:
        args, spec = self._args, self._args.spec
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            self._copy_stream = torch.cuda.Stream()
        self._model = self._load_model()
        self._rotary = RotaryTable(spec.rope, spec.head_dim, spec.max_position_embeddings, args.max_model_len,
                                   self._dtype, self._device)
        shape = attention_shape(spec, self._parallel)
        backend: type[AttentionBackend] = registry.load(registry.ATTENTION_BACKENDS["torch"])
        # Block ids are common to all ranks, so the rank with the least room decides.
        num_blocks = self._parallel.minimum(num_kv_blocks(args, shape, self._dtype, self._device))
        self._attention = backend(shape, num_blocks, args.cache.block_size, self._dtype, self._device)
        self._state = RequestState(args.num_slots, args.max_model_len, args.cache.block_size, self._device)
        self._sampler = Sampler(self._state, self._device)
        return WorkerReady(num_kv_blocks=num_blocks, device=self._describe())

    @torch.inference_mode()
    def execute(self, step: StepInput) -> PendingOutput:
        launched = time.monotonic_ns()
        started = self._record()
        # 1. What is new, and how this step's tokens lie.
        self._state.apply(step)
        batch = make_batch(self._state, step, self._args.cache.block_size)
        # 2. The model, for the tokens that sample.
        logits = self._forward(batch)
        if logits is None:
            return self._output(step.step_id, None, started, launched)
        # 3. The tokens stay on the device for the next step, and go to the host beside it.
        tokens = self._sampler(logits, batch)
        sampled_slots = batch.slots[batch.sampling_rows].astype(np.int64)
        self._state.last_sampled.index_copy_(0, self._upload(sampled_slots), tokens)
        return self._output(step.step_id, tokens, started, launched)

    def _forward(self, batch: HostBatch) -> Tensor | None:
        """Logits of the rows that sample; None if none does."""
        token_ids = self._input_ids(batch)
        self._attention.begin_step(batch, self._upload(batch.slot_mapping))
        rotary = self._rotary.rows(self._upload(batch.positions))
        every = len(batch.logits_tokens) == len(batch.token_ids)
        logits = self._model(token_ids, rotary, self._attention, None if every else self._upload(batch.logits_tokens))
        return logits if len(batch.logits_tokens) else None

    def _input_ids(self, batch: HostBatch) -> Tensor:
        """Known ids from the host, sampled ones from the device."""
        if not len(batch.unknown):
            return self._upload(batch.token_ids)
        sampled = self._state.last_sampled.index_select(0, self._upload(batch.unknown_slots))
        if len(batch.unknown) == len(batch.token_ids):
            return sampled
        return self._upload(batch.token_ids).index_copy_(0, self._upload(batch.unknown), sampled)

    def _output(self, step_id: int, tokens: Tensor | None, started: torch.cuda.Event | None,
                launched: int) -> PendingOutput:
        if started is None:
            ids = tokens.numpy().astype(np.int32) if tokens is not None else np.empty(0, np.int32)
            return DoneOutput(StepOutput(step_id, launched, time.monotonic_ns(), ids))
        device_ids = tokens if tokens is not None else torch.empty(0, dtype=torch.int64, device=self._device)
        self._copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copy_stream):
            host_ids = torch.empty(device_ids.shape, dtype=torch.int64, pin_memory=True)
            host_ids.copy_(device_ids, non_blocking=True)
            device_ids.record_stream(self._copy_stream)
            done = torch.cuda.Event(enable_timing=True, blocking=True)
            done.record()
        return GpuOutput(step_id, host_ids, started, done, launched)

    def _record(self) -> torch.cuda.Event | None:
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _upload(self, column: Int64) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(column))
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def _load_model(self) -> DecoderForCausalLM:
        args, spec = self._args, self._args.spec
        build = registry.load(registry.MODELS[spec.architecture])
        if args.model.load_format == "dummy":
            dummy = DummyWeights(args.model.dummy_seed, self._dtype, self._device)
            return build(spec, dummy, self._parallel)
        with SafetensorsWeights(spec.path, self._dtype, self._device) as weights:
            if spec.tie_word_embeddings:
                weights.ignore("lm_head.weight")
            model: DecoderForCausalLM = build(spec, weights, self._parallel)
            weights.finish()
        return model

    def _describe(self) -> str:
        if self._device.type == "cuda":
            return torch.cuda.get_device_name(self._device)
        return f"cpu ({torch.get_num_threads()} threads, {str(self._dtype).removeprefix('torch.')})"


def pick_device(args: WorkerArgs) -> torch.device:
    """The GPU of this rank, or the CPU. Raises EngineStartError where a GPU is asked for and there is none."""
    wanted = args.parallel.device
    have = torch.cuda.device_count() if wanted in ("auto", "cuda") else 0
    if wanted == "cpu" or (wanted == "auto" and have == 0):
        return torch.device("cpu")
    if have < args.parallel.tensor_parallel_size:
        raise EngineStartError(f"tensor_parallel_size: {args.parallel.tensor_parallel_size} ranks need as many GPUs, "
                               f"torch sees {have}; use device 'cpu' or fewer ranks")
    return torch.device("cuda", args.rank)


def pick_dtype(args: WorkerArgs, device: torch.device) -> torch.dtype:
    """What was asked for; or the checkpoint's type, but float32 on a CPU that would have to emulate it."""
    if args.model.dtype != "auto":
        return getattr(torch, args.model.dtype)
    dtype: torch.dtype = getattr(torch, args.spec.dtype)
    if device.type == "cpu" and not (dtype == torch.bfloat16 and cpu_has_bfloat16()):
        return torch.float32
    return dtype


def cpu_has_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 natively."""
    try:
        with open("/proc/cpuinfo") as file:
            flags = file.read()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags
