"""Measure the CPU time of one request in one decode step, component by component.

    python benchmarks/host_costs.py [--requests 1 64 256 1024] [--steps 200]

Everything runs in one process and without a device. The scheduler decides and takes tokens back,
and the flight recorder records it. The step is encoded, crosses a ring in shared memory and is
decoded. A frontend detokenises and delivers to one reader a request. The output is microseconds per
request-step, the mean over the steps. In an engine all of it happens beside the device's step and
does not delay it.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import numpy as np

from sidestep import DEFAULT_MODEL, SamplingParams
from sidestep.engine_core.kv_cache.kv_cache_manager import KVCacheManager
from sidestep.engine_core.scheduling.flight_recorder import FlightRecorder
from sidestep.engine_core.scheduling.scheduler import Scheduler
from sidestep.engine_core.structured_outputs.grammars import Grammars
from sidestep.frontend.input.input_processor import ProcessedRequest
from sidestep.frontend.input.tokenizer import Tokenizer
from sidestep.frontend.output.detokenizer import Detokenizer
from sidestep.frontend.output.output_processor import OutputProcessor
from sidestep.frontend.output.outputs import RequestOutput
from sidestep.frontend.output.request_state import RequestState
from sidestep.ipc.config_sections import SchedulerConfig
from sidestep.ipc.params.sampling_params import RequestOutputKind
from sidestep.ipc.transport.messages import (
    AddRequest,
    Outputs,
    decode_to_frontend,
    encode,
    pack_ids,
)
from sidestep.ipc.transport.shm_ring import RingReader, RingWriter, create_ring
from sidestep.ipc.transport.step import StepInput, StepOutput

COLUMNS = (
    "schedule",
    "update",
    "record",
    "encode",
    "ring",
    "decode",
    "message",
    "detokenise",
    "deliver",
)
PROMPT = 64


class Stopwatch:
    """Seconds by component."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time of the `with` block to a component."""
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start


def params(max_tokens: int) -> SamplingParams:
    """Return the sampling parameters of every request."""
    return SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        seed=0,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )


def engine_side(requests: int, steps: int, watch: Stopwatch) -> list[bytes]:
    """Run the core's and the worker's part, and return the messages for the frontend."""
    config = SchedulerConfig(
        max_num_seqs=requests, max_num_batched_tokens=max(2048, PROMPT * requests)
    )
    scheduler = Scheduler(
        config,
        config.limits("fake"),
        KVCacheManager(requests * 64, 16),
        max_model_len=1024,
        eos_token_ids=(),
        grammars=Grammars("", 4096, (), time.monotonic),
        clock=time.monotonic,
    )
    rng = random.Random(0)
    for handle in range(requests):
        prompt = [rng.randrange(4000) for _ in range(PROMPT)]
        scheduler.add(
            AddRequest(
                client=0,
                handle=handle,
                request_id=str(handle),
                prompt_token_ids=pack_ids(prompt),
                sampling=params(steps + 9),
                arrival=0.0,
            )
        )
    recorder = FlightRecorder(time.monotonic)
    spec = create_ring(1)
    writer, reader = RingWriter(spec), RingReader(spec, 0)
    messages: list[bytes] = []
    in_flight: list[StepInput] = []
    for number in count():
        timed = watch if number >= 2 else Stopwatch()
        with timed("schedule"):
            step = scheduler.schedule()
        assert step is not None
        with timed("record"):
            recorder.scheduling()
            recorder.scheduled()
            recorder.submitted(scheduler.situation())
        with timed("encode"):
            parts = step.encode()
        with timed("ring"):
            writer.send(parts)
            reader.wait()
            received = reader.receive()
        assert received is not None
        with timed("decode"):
            StepInput.decode(received[1])
        in_flight.append(step)
        if len(in_flight) < 2:
            continue
        oldest = in_flight.pop(0)
        tokens = np.fromiter((rng.randrange(4000) for _ in oldest.slots), np.int32)
        output = StepOutput(oldest.step_id, 0, 0, tokens)
        with timed("record"):
            recorder.output_taken(output)
            recorder.turn_ended()
        with timed("update"):
            outputs = scheduler.update(output)
        with timed("message"):
            data = encode(outputs[0])
            decode_to_frontend(data)
        messages.append(data)
        if number == steps + 1:
            return messages
    raise AssertionError


async def frontend_side(requests: int, messages: list[bytes], watch: Stopwatch) -> None:
    """Run one reader a request; each takes the new tokens after every step."""
    tokenizer = Tokenizer(DEFAULT_MODEL)
    processor = OutputProcessor(lambda handles: None)
    states = []
    for handle in range(requests):
        request = ProcessedRequest(
            prompt=None,
            prompt_token_ids=[1] * PROMPT,
            sampling=params(9999),
            arrival=0.0,
            priority=0,
            cache_salt=None,
            num_public_tokens=0,
            deadline=None,
        )
        states.append(RequestState(handle, str(handle), request, tokenizer))
        processor.add(states[-1])
    readers = [asyncio.create_task(read(state, len(messages))) for state in states]
    await asyncio.sleep(0)
    for data in messages[2:]:
        message = decode_to_frontend(data)
        assert isinstance(message, Outputs)
        with watch("deliver"):
            processor.handle(message)
            # The readers run now: wake-up, output object, back to sleep.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
    for task in readers:
        task.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    # Detokenising runs once more alone, to be shown apart from the rest of the delivery.
    detokenizers = [Detokenizer(tokenizer, [1] * PROMPT) for _ in range(requests)]
    rng = random.Random(0)
    for _ in messages[2:]:
        tokens = [rng.randrange(4000) for _ in range(requests)]
        with watch("detokenise"):
            for detokenizer, token in zip(detokenizers, tokens, strict=True):
                detokenizer.add(token)


async def read(state: RequestState, steps: int) -> list[RequestOutput]:
    """Read a request's outputs, like a user's `async for`."""
    return [await state.next_output() for _ in range(steps + 99)]


def main() -> None:
    """Print a line for each number of requests."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    print("microseconds per request-step ('deliver' is without detokenising)")
    print(
        f"{'requests':>8}"
        + "".join(f"{name:>12}" for name in COLUMNS)
        + f"{'sched+upd':>12}{'all':>8}"
    )
    for requests in args.requests:
        watch = Stopwatch()
        messages = engine_side(requests, args.steps, watch)
        asyncio.run(frontend_side(requests, messages, watch))
        cost = {name: watch.seconds[name] / args.steps / requests * 1e6 for name in COLUMNS}
        cost["deliver"] -= cost["detokenise"]
        print(
            f"{requests:>8}"
            + "".join(f"{cost[name]:>12.2f}" for name in COLUMNS)
            + f"{cost['schedule'] + cost['update']:>12.2f}{sum(cost.values()):>8.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
