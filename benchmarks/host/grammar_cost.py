"""Measure the host's work in a step whose requests are held to a grammar, part by part.

    python benchmarks/host/grammar_cost.py [--requests 64] [--vocab 151936] [--steps 200]

The work lies between the tokens of a step and the masks of the next one. The matchers take the
tokens (follow) and compute the masks (masks). The masks are looked up among those that the workers
have (place). A message crosses a ring in shared memory (send), and a worker updates its table
(table). The output is milliseconds of CPU time a step for each kind of grammar: the mean, and in
parentheses the 90th percentile. `all sent` is the time of send and table if each step brought all
of its masks. `different` counts masks over all steps. An engine with more processors divides the
first two parts among several threads.

Tokens are drawn uniformly from the allowed ones, as from a model with random weights. So bounded
strings grow to their ends, where masks are slowest. The tokenizer is generated in the given size.
There is no device, and one worker.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.engine.structured_outputs import SCHEMA, unbounded, write_tokenizer
from sidestep.engine_core.kv_cache.kv_cache_manager import KVCacheManager
from sidestep.engine_core.requests.mask_job import FOREVER
from sidestep.engine_core.requests.request import Request, grammars_of
from sidestep.engine_core.scheduling.step_plan import StepBuilder
from sidestep.engine_core.structured_outputs.grammars import Grammars
from sidestep.engine_core.structured_outputs.mask_table import MaskTable
from sidestep.executor.sampling.grammar_masks import GrammarMasks
from sidestep.executor.sampling.logits_processor import ProcessorSetup
from sidestep.frontend.input.output_form import make_grammar
from sidestep.ipc.config_sections import SchedulerConfig
from sidestep.ipc.params.sampling_params import SamplingParams
from sidestep.ipc.params.structured_outputs_params import Grammar, StructuredOutputsParams
from sidestep.ipc.transport.messages import AddRequest, pack_ids
from sidestep.ipc.transport.shm_ring import RingReader, RingWriter, create_ring
from sidestep.ipc.transport.step import Int32, StepMasks

PARTS = ("follow", "masks", "place", "send", "table", "all sent")
WARM_UP = 50
"""Steps before the measurement, in which the matchers learn the most."""


FORMS = {
    "schema, bounded strings": StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
    "schema, free strings": StructuredOutputsParams(json=unbounded(), disable_any_whitespace=True),
    "the same, white space": StructuredOutputsParams(json=unbounded()),
    "any JSON object": StructuredOutputsParams(json_object=True),
    "regex": StructuredOutputsParams(regex=r"([a-z]{3,9} [0-9]+(\.[0-9]{2})? )*"),
}


class Stopwatch:
    """CPU milliseconds of each step, by part."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Time one part of a step."""
        start = time.thread_time()
        yield
        self.times[part].append((time.thread_time() - start) * 1e3)


class Wire:
    """Path of masks from the core to one worker's table."""

    def __init__(self, vocab: int, count: int) -> None:
        limits = SchedulerConfig(max_num_seqs=count, async_scheduling=False).limits("cpu")
        self.core = MaskTable(limits.num_masks)
        setup = ProcessorSetup(device=torch.device("cpu"), vocab_size=vocab, num_slots=count)
        self._worker = GrammarMasks(setup, limits.num_masks)
        ring = create_ring(1)
        self._writer, self._reader = RingWriter(ring), RingReader(ring, 0)
        slots = np.arange(count, dtype=np.int32)
        self._step = replace(
            StepBuilder(0, KVCacheManager(1, 16)).build()[0],
            slots=slots,
            num_tokens=np.ones_like(slots),
        )

    def send(self, masks: StepMasks) -> StepMasks:
        """Send a message, and return it as the worker reads it."""
        self._writer.send(masks.encode())
        message = self._reader.receive()
        assert message is not None
        return StepMasks.decode(message[1])

    def take(self, masks: StepMasks) -> None:
        """Update the worker's table."""
        self._worker.take(self._step, masks)


def make_requests(count: int, grammar: Grammar, grammars: Grammars) -> list[Request]:
    """Return requests with their matchers."""
    message = AddRequest(
        client=0,
        handle=0,
        request_id="",
        prompt_token_ids=pack_ids([1]),
        sampling=SamplingParams(),
        arrival=0.0,
        grammar=grammar,
    )
    requests = [Request.from_message(message, 1 << 20, frozenset()) for _ in range(count)]
    for request in requests:
        problem = grammars.start(request, grammar)
        assert problem is None, problem
    while any(request.lacks_matcher for request in requests):
        grammars.take_compiled()
        time.sleep(1e-3)
    return requests


def run(
    form: StructuredOutputsParams, grammars: Grammars, vocab: int, count: int, steps: int
) -> str:
    """Return a line of the table."""
    grammar, rng = make_grammar(form, {}), np.random.default_rng(0)
    requests, wire, alone = (
        make_requests(count, grammar, grammars),
        Wire(vocab, count),
        Wire(vocab, count),
    )
    watch, allowed, tokens = Stopwatch(), dict[bytes, Int32](), [0] * count
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            watch.times.clear()
        if step:
            with watch("follow"):
                grammars.advance(
                    [
                        (state.matcher, token)
                        for state, token in zip(grammars_of(requests), tokens, strict=True)
                        if state.matcher
                    ]
                )
        for i, state in enumerate(grammars_of(requests)):
            if state.matcher is not None and state.matcher.is_stopped():
                requests[i] = make_requests(1, grammar, grammars)[0]
        with watch("masks"):
            masks = [mask for mask in grammars.masks(requests, 0, 0.0, FOREVER) if mask is not None]
        with watch("place"):
            message = wire.core.message(0, range(count), grammars_of(requests), masks)
        with watch("send"):
            message = wire.send(message)
        with watch("table"):
            wire.take(message)
        with watch("all sent"):
            indices = np.arange(count, dtype=np.int32)
            alone.take(alone.send(StepMasks(0, 0, indices, indices, np.concatenate(masks))))
        for i, mask in enumerate(masks):
            key = mask.tobytes()
            if key not in allowed:
                allowed[key] = np.flatnonzero(
                    np.unpackbits(mask.view(np.uint8), bitorder="little")
                ).astype(np.int32)
            tokens[i] = int(rng.choice(allowed[key]))
    columns = (
        f"{np.mean(watch.times[part]):7.2f} ({np.percentile(watch.times[part], 90):5.2f})"
        for part in PARTS
    )
    total = np.sum([watch.times[part] for part in PARTS[:-1]], axis=0)
    return (
        "".join(columns) + f"{total.mean():7.2f} ({np.percentile(total, 90):5.2f}){len(allowed):11}"
    )


def main() -> None:
    """Print a table with a line for each form of grammar."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        grammars = Grammars(
            write_tokenizer(folder, args.vocab), args.vocab, (0,), time.monotonic, num_workers=1
        )
        start = time.thread_time()
        grammars.load()
    print(
        f"tokenizer read in {time.thread_time() - start:.1f} s; {args.requests} requests; "
        "milliseconds a step"
    )
    print(" " * 24 + "".join(f"{part:>15}" for part in (*PARTS, "sum but this")) + "  different")
    for name, form in FORMS.items():
        print(f"{name:24}" + run(form, grammars, args.vocab, args.requests, args.steps), flush=True)


if __name__ == "__main__":
    main()
