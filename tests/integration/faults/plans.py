"""Random fault plans: an engine, its clients, and what goes wrong. A seed gives one plan."""

from __future__ import annotations

import random
from typing import Any, Literal

import msgspec

from sidestep.ipc.common.fault_plan import Fault, FaultKind, FaultPlan, FaultyMessage
from sidestep.ipc.params.sampling_params import RequestOutputKind
from tests.integration.faults.asks import Ask

POISON = 270
"""The token of a request that harms every worker that runs it. No other prompt has it."""
STALL_S = 2.0
"""The limit for stalls of engines whose faults end by it. A loaded machine lets a process wait for
some part of it."""
_FORMS = ("[a-d]{2,6}x", "(ab|c){1,9}", "a?b*c{0,3}", "[0-9]{30}")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """An engine, its clients and its faults."""

    seed: int
    options: dict[str, Any]
    """Options of EngineArgs."""
    num_frontends: int
    asks: list[Ask]
    faults: list[Fault]
    leaver: int | None = None
    """The frontend that ends, with all that it has asked for, when its first output has come."""

    def __str__(self) -> str:
        return msgspec.json.encode(self).decode()

    @property
    def fault_plan(self) -> FaultPlan:
        """The faults, as the fake device takes them."""
        return FaultPlan(tuple(self.faults))

    @property
    def num_replicas(self) -> int:
        """Replicas of the engine."""
        return int(self.options["data_parallel_size"])

    def may_blame(self, ask: Ask) -> bool:
        """Whether a worker may name a request as the cause of a failed step."""
        return POISON in ask.prompt and any(fault.named for fault in self.faults)

    @property
    def may_kill_twice(self) -> bool:
        """Whether the faults can kill a request's replica twice."""
        restarts = self.options["restart_limit"] > 0
        deadly = [fault for fault in self.faults if fault.kind != "slow"]
        each = [
            (self.num_replicas if fault.replica is None else 1)
            * (2 if restarts and fault.start is None else 1)
            for fault in deadly
        ]
        return sum(each) > 1


def causes(fault: Fault) -> list[str]:
    """Return the patterns of the errors that name a fault as the cause."""
    killed = (
        [r"engine core .*was killed by SIGKILL", "the engine core has ended"]
        if fault.process == "core"
        else [rf"worker {fault.rank}\b.*was killed by SIGKILL"]
    )
    stalled = ["the steps in flight made no progress", "the engine core has not answered"]
    return {
        "die": killed,
        # A guest may see no more than the end of the core.
        "hang": [*stalled, "the engine core has ended"],
        "raise": [rf"worker {fault.rank}\b.*the fault plan raises at step"],
        "oom": [rf"worker {fault.rank}\b.*the fault plan has no memory at step"],
        "slow": [],
        "drop": [
            "has come in the place of",
            "came for step",
            *stalled,
            "the engine core has ended",
        ],
        "corrupt": ["is not as it was written"],
    }[fault.kind]


def make_plan(seed: int) -> Plan:
    """Return the plan of a seed."""
    rng = random.Random(seed)
    tp, pp = rng.choice([(1, 1), (1, 1), (2, 1), (1, 2)])
    options: dict[str, Any] = {
        "data_parallel_size": rng.choice([1, 2]),
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": pp,
        "max_num_seqs": rng.choice([4, 7]),
        # Four choices, or beams, of the longest prompt must fit; hardly more makes preemptions.
        "num_kv_blocks": rng.choice([36, 60, 200]),
        "max_num_batched_tokens": rng.choice([16, 64, 256]),
        "fake_step_ms": rng.choice([0.0, 0.0, 1.0]),
        "async_scheduling": rng.random() < 0.75,
        "enable_prefix_caching": rng.random() < 0.75,
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
        "restart_limit": rng.choice([0, 1, 3]),
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}
        if rng.random() < 0.2
        else None,
    }
    num_frontends = rng.choice([1, 1, 2, 3])
    asks = [make_ask(rng, index, num_frontends) for index in range(rng.randint(8, 14))]
    if options["scheduling_policy"] == "priority":
        asks = [msgspec.structs.replace(ask, priority=rng.randint(0, 2)) for ask in asks]
    faults = [
        msgspec.structs.replace(fault, start=rng.choice([None, 0, 0, 1]))
        if fault.for_token is None
        else fault
        for fault in make_faults(rng, options["data_parallel_size"], tp * pp, (pp - 1) * tp)
    ]
    if options["restart_limit"] and all(fault.start == 1 for fault in faults):
        victim = rng.randrange(options["data_parallel_size"])
        faults.append(Fault(kind="die", at=rng.randint(0, 9), replica=victim, start=0))
    if any(fault.for_token == POISON for fault in faults):
        for index in rng.sample(range(len(asks)), rng.choice([1, 1, 2])):
            asks[index] = poisoned(asks[index])
    if any(fault.kind in ("hang", "drop") for fault in faults):
        options["stall_limit"] = STALL_S
    if tp == 2 and rng.random() < 0.5:
        faults += [_other_rank(fault) for fault in faults if fault.kind in ("raise", "oom")]
    leaver = rng.randrange(1, num_frontends) if num_frontends > 1 and rng.random() < 0.3 else None
    return Plan(
        seed=seed,
        options=options,
        num_frontends=num_frontends,
        asks=asks,
        faults=faults,
        leaver=leaver,
    )


def _other_rank(fault: Fault) -> Fault:
    """Return the same fault of the other rank, so that both raise alike."""
    return msgspec.structs.replace(fault, rank=1 - fault.rank)


def poisoned(ask: Ask) -> Ask:
    """Return a request that kills each worker that runs it, if the plan has such a fault."""
    return msgspec.structs.replace(ask, prompt=[*ask.prompt, POISON])


def make_ask(rng: random.Random, index: int, num_frontends: int) -> Ask:
    """Return a random request, the index-th of its plan."""
    shared = [5, 6, 7, 8] * rng.choice([0, 3, 8])
    more: dict[str, Any] = {}
    form = rng.choice(["plain", "plain", "plain", "n", "regex", "beams", "logprobs"])
    if form == "n":
        more = {"n": 4}
    elif form == "regex":
        more = {"regex": rng.choice(_FORMS), "n": rng.choice([1, 1, 3])}
    elif form == "beams":
        more = {"beam_width": rng.choice([2, 4]), "leaves_after": None, "aborts_after": None}
    elif form == "logprobs":
        more = {"logprobs": rng.choice([0, 3])}
    return Ask(
        **{
            "prompt": shared + [rng.randrange(1, 250) for _ in range(rng.randint(1, 24))],
            "max_tokens": rng.randint(1, 12 if form == "beams" else 40),
            "seed": rng.randrange(1 << 40),
            "frontend": rng.randrange(num_frontends),
            "output_kind": rng.choice(list(RequestOutputKind)),
            "leaves_after": (leaves := rng.choice([None] * 5 + [1, 4])),
            "aborts_after": rng.choice([None] * 7 + [1, 3]) if leaves is None else None,
            "starts_after": rng.randrange(index) if index > 4 and rng.random() < 0.5 else None,
            **more,
        }
    )


def make_faults(
    rng: random.Random, num_replicas: int, num_ranks: int, answering: int
) -> list[Fault]:
    """Return one fault or two: of one replica, of both, or a poison for all, perhaps with others.

    answering: the rank whose outputs the core takes. Only its hang is noticed at once.
    """
    poisons = list[Fault]()
    if rng.random() < 0.25:
        kind: FaultKind = rng.choice(["die", "raise", "raise"])
        named = kind == "raise" and rng.random() < 0.5
        process: Literal["worker", "core"] = (
            rng.choice(["worker", "worker", "core"]) if kind == "die" else "worker"
        )
        rank = rng.randrange(num_ranks)
        poisons.append(Fault(kind=kind, for_token=POISON, rank=rank, process=process, named=named))
        if rng.random() < 0.6:
            return poisons
    victim = rng.randrange(num_replicas)
    victims = [victim, 1 - victim] if num_replicas == 2 and rng.random() < 0.2 else [victim]
    faults = [_make_fault(rng, victim, num_ranks, answering) for victim in victims]
    if rng.random() < 0.2:
        faults.append(
            Fault(kind="slow", at=rng.randint(0, 9), seconds=0.003, replica=rng.choice(victims))
        )
    return poisons + faults


def _make_fault(rng: random.Random, replica: int, num_ranks: int, answering: int) -> Fault:
    at, rank = rng.choice([0, 1, rng.randint(2, 12), rng.randint(2, 60)]), rng.randrange(num_ranks)
    kind: FaultKind = rng.choice(
        ["die", "die", "raise", "raise", "oom", "hang", "hang", "slow", "drop", "corrupt"]
    )
    if kind in ("die", "hang"):
        process: Literal["worker", "core"] = rng.choice(["worker", "worker", "core", "core"])
        rank = answering if kind == "hang" else rank
        return Fault(kind=kind, at=at, rank=rank, replica=replica, process=process)
    if kind in ("drop", "corrupt"):
        message: FaultyMessage = rng.choice(["step", "step", "masks", "output"])
        rank = answering if message == "output" else rank
        return Fault(kind=kind, at=at, rank=rank, replica=replica, message=message)
    seconds = 0.003 if kind == "slow" else 0.0
    return Fault(kind=kind, at=at, rank=rank, replica=replica, seconds=seconds)
