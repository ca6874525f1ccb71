"""The engine core's process: the busy loop between frontends' sockets and workers' rings."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
import traceback
from dataclasses import replace

import msgspec

from sidestep.engine_core.core import EngineCore
from sidestep.engine_core.kv_cache.kv_cache_manager import KVCacheManager
from sidestep.engine_core.progress import Progress, WorkersStalledError
from sidestep.engine_core.requests.request_checks import RequestChecks
from sidestep.engine_core.scheduling.scheduler import Scheduler
from sidestep.engine_core.structured_outputs.grammars import Grammars
from sidestep.executor.base import Executor, WorkerReady
from sidestep.ipc.common.errors import EngineDeadError, EngineStartError
from sidestep.ipc.config import EngineConfig
from sidestep.ipc.model.cache_groups import cache_groups
from sidestep.ipc.processes.addresses import ClientAddress
from sidestep.ipc.processes.core_args import CoreArgs
from sidestep.ipc.processes.process import freeze_heap
from sidestep.ipc.transport.black_box import BlackBox
from sidestep.ipc.transport.channels import CoreChannel
from sidestep.ipc.transport.messages import Answer, Connect, Dead, Ready
from sidestep.ipc.transport.shm_ring import SPIN_S

_LONGEST_WAIT_S = 3600.0
"""Seconds after which the loop turns although nothing has come: a poll takes no longer ones than
some weeks."""


def main(args: CoreArgs, executor: Executor, obstacle: Dead | None = None) -> None:
    """Run the process from the moment when its workers start.

    Whatever ends the process, it tells its frontends the reason, and the exit status is not 0.
    obstacle: the reason why the workers have not been launched.
    """
    channel = CoreChannel(args.clients)
    try:
        if obstacle is None:
            core, ready = start(args.config, executor, _box(args))
            hosts = {host.name: host.address for host in args.rank_hosts}
            ready = msgspec.structs.replace(ready, hosts=hosts)
            channel.broadcast(ready)
            freeze_heap()
            run(core, channel, ready)
        else:
            channel.broadcast(obstacle)
    except WorkersStalledError as error:
        channel.broadcast(Dead(cause=str(error), origin="stall"))
    except (EngineStartError, EngineDeadError) as error:
        channel.broadcast(Dead(cause=str(error)))
    except BaseException as error:
        traceback.print_exc()
        cause = f"engine core failed: {type(error).__name__}: {error}"
        channel.broadcast(Dead(cause=cause, origin="core"))
    channel.close()
    executor.shutdown()
    sys.exit(1)


def _box(args: CoreArgs) -> BlackBox | None:
    return None if args.black_box is None else BlackBox.of_descriptor(args.black_box)


def start(
    config: EngineConfig, executor: Executor, box: BlackBox | None
) -> tuple[EngineCore, Ready]:
    """Start the workers and build the core on what they found. Raises EngineStartError."""
    spec = config.spec
    grammars = Grammars(config.tokenizer_path, spec.vocab_size, spec.eos_token_ids, time.monotonic)
    loading = threading.Thread(target=grammars.load, name="grammars", daemon=True)
    loading.start()
    worker = executor.start()
    limits = config.limits(worker.device_type)
    if worker.num_states:  # each running request owns one, and one more may be copied from
        most = min(limits.max_num_seqs, worker.num_states - 1)
        limits = replace(limits, max_num_seqs=most)
    kv = KVCacheManager(
        worker.num_kv_blocks,
        worker.block_size,
        config.cache.enable_prefix_caching,
        cache_groups(spec.layers, config.max_model_len),
        limits.max_tokens_ahead,
        worker.num_states,
    )
    max_model_len = fit_model_len(config, worker, kv)
    scheduler = Scheduler(
        config.scheduler,
        limits,
        kv,
        max_model_len=max_model_len,
        eos_token_ids=spec.eos_token_ids,
        grammars=grammars,
        clock=time.monotonic,
    )
    loading.join()
    core = EngineCore(
        scheduler,
        executor,
        RequestChecks(spec, config.model.processor_names),
        max_steps_in_flight=limits.max_steps_in_flight,
        clock=time.monotonic,
        progress=Progress(
            config.frontend.stall_limit,
            time.monotonic,
            None if worker.device_type == "cuda" else executor.cpu_use(),
        ),
        box=box,
    )
    ready = Ready(
        max_model_len=max_model_len,
        num_kv_blocks=worker.num_kv_blocks,
        block_size=worker.block_size,
        device=worker.device,
        device_type=worker.device_type,
        core_pid=os.getpid(),
        worker_pids=executor.worker_pids(),
    )
    return core, ready


def fit_model_len(config: EngineConfig, worker: WorkerReady, kv: KVCacheManager) -> int:
    """Return the length in tokens of the longest request that the KV cache can hold.

    Raises EngineStartError when that is less than the user asked for.
    """
    room = kv.longest
    if config.max_model_len <= room:
        return config.max_model_len
    if config.may_shrink_max_model_len:
        return room
    blocks = kv.num_blocks_of(config.max_model_len)
    raise EngineStartError(
        f"max_model_len: {config.max_model_len} tokens do not fit in the KV cache, which holds "
        f"{room}; set it to {room} or less, leave it out to have it fitted, or give the cache "
        f"{blocks} blocks in the place of {worker.num_kv_blocks}, by num_kv_blocks or "
        "kv_cache_memory_bytes"
    )


def run(core: EngineCore, channel: CoreChannel, ready: Ready) -> None:
    """Run the busy loop. A turn does all that can be done, so waiting at its end delays nothing."""
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    poll.register(core.executor.fileno(), select.POLLIN)
    poll.register(core.scheduler.grammars.fileno(), select.POLLIN)
    while True:
        # 1. See which frontends have left, then take what the others sent.
        for client in channel.take_gone():
            core.client_left(client)
        while messages := channel.receive():
            for message in messages:
                answer = (
                    _connect(message, channel, ready)
                    if isinstance(message, Connect)
                    else core.handle(message)
                )
                if answer is not None:
                    channel.send(message.client, answer)
        # 2. Take what came back, keep the pipeline full, send the tokens on.
        try:
            made = core.step()
        except BaseException:
            for client, begun in core.take_started():
                channel.send(client, begun)
            raise
        for client, outputs in made:
            channel.send(client, outputs)
        for client, answered in core.take_answers():
            channel.send(client, answered)
        # 3. Wait for a frontend, a worker, a grammar or a deadline. With steps in flight, first
        #    poll for a while without sleeping.
        if not (core.in_flight and _look(poll)):
            poll.poll(_milliseconds_until(core.next_deadline()))


def _connect(message: Connect, channel: CoreChannel, ready: Ready) -> Answer:
    """Connect another frontend, and tell it that the engine serves as soon as it listens."""
    try:
        address = ClientAddress(message.to_core, message.from_core, message.server_key)
        client = channel.connect(address)
    except Exception as error:
        return Answer(call_id=message.call_id, error=f"the engine cannot connect: {error}")
    channel.send(client, ready)
    return Answer(call_id=message.call_id, result={"client": client})


def _look(poll: select.poll) -> bool:
    """Return whether something came within `SPIN_S` seconds of polling without sleeping."""
    until = time.perf_counter() + SPIN_S
    while time.perf_counter() < until:
        if poll.poll(0):
            return True
    return False


def _milliseconds_until(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    return min(max(0.0, deadline - time.monotonic()), _LONGEST_WAIT_S) * 1000
