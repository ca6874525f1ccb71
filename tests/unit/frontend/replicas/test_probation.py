"""Probation by itself: poisons end alone after three deaths at most, and all others go on."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from sidestep.frontend.replicas.probation.probation import (
    GROUP_SIZE,
    MOST_FREE_DEATHS,
    Action,
    AskIdle,
    Blame,
    Claim,
    Park,
    Path,
    Probation,
    Run,
)

LENGTH = 5
"""Number of tokens of each request."""


class Engine:
    """Replicas and frontends that do what a Probation wants, one event at a time."""

    def __init__(self, rng: random.Random, num_replicas: int, restarts: bool) -> None:
        self.rng, self.restarts = rng, restarts
        self.serving, self.starting = set(range(num_replicas)), set[int]()
        self.probation = Probation(self.serving)
        self.at: dict[Path, int | None] = {}
        """The replica of each request that has not ended; None for one that waits."""
        self.begun = set[Path]()
        self.tokens: dict[Path, int] = {}
        self.held: dict[Path, int] = {}
        """The suspects, each with its tokens at the death."""
        self.granted = set[Path]()
        self.unreported: list[tuple[int, Path]] = []
        self.claim: Claim | None = None
        self.asked: int | None = None
        self.blamed: dict[Path, int] = {}
        self.deaths: dict[Path, int] = {}
        """Number of deaths of its replica that each poison has caused."""
        self.kills_alone: set[Path] = set()
        self.poisons: set[Path] = set()
        self.num_free = 0
        self.actions: deque[Action] = deque()

    @property
    def place(self) -> int | None:
        return None if self.claim is None else self.claim.replica

    def act(self, actions: Iterable[Action]) -> None:
        self.actions += actions
        while self.actions:
            action = self.actions.popleft()
            if isinstance(action, Claim):
                self.claim = action
                if action.ends_turn:
                    self.granted -= {path for path, at in self.at.items() if at is None}
                for path, at in self.at.items():
                    if at == action.replica and path not in self.granted:
                        self.at[path] = None  # it leaves before the replica says that it is idle
                        self.begun.discard(path)
            elif isinstance(action, AskIdle):
                self.asked = action.replica
            elif isinstance(action, Run):
                assert not [p for p, at in self.at.items() if at == self.place], "it runs alone"
                assert 1 <= len(action.suspects) <= GROUP_SIZE
                self.granted.update(action.suspects)
            elif isinstance(action, Park):
                for path in action.suspects:
                    if self.at.get(path) == self.place:
                        self.at[path] = None
                        self.begun.discard(path)
            else:
                assert isinstance(action, Blame)
                self.blamed[action.suspect] = self.deaths.get(action.suspect, 0)
                self.end(action.suspect)

    def end(self, path: Path) -> None:
        del self.at[path]
        self.begun.discard(path)
        self.granted.discard(path)
        self.unreported = [each for each in self.unreported if each[1] != path]
        if self.held.pop(path, None) is not None:
            self.act(self.probation.passed([path]))

    def kill(self, replica: int, *, of_host: bool = False) -> None:
        is_start = replica in self.starting
        if not is_start and not of_host and self.probation.is_free(replica):
            self.num_free += 1
        self.serving.discard(replica)
        self.starting.discard(replica)
        for path, at in self.at.items():
            if at == replica:
                is_suspect = path in self.held or not of_host and path in self.begun
                if is_suspect and path in self.begun:
                    self.unreported.append((replica, path))
                if is_suspect:
                    self.held[path] = self.tokens[path]
                    self.granted.discard(path)
                self.at[path] = None
        self.begun -= {path for path, at in self.at.items() if at is None}
        if self.restarts:
            self.starting.add(replica)
        returns = self.restarts and not of_host
        self.act(self.probation.died(replica, returns=returns, blames=not of_host))

    def turn(self) -> None:
        """Let something happen that may happen next."""
        events = ["send", "step", "step"]
        events += ["serve"] * bool(self.starting) + ["idle"] * (self.asked is not None)
        events += ["report"] * (self.claim is not None)
        event = self.rng.choice(events)
        if event == "serve":
            replica = self.rng.choice(sorted(self.starting))
            self.starting.discard(replica)
            self.serving.add(replica)
            self.act(self.probation.serves(replica))
        elif event == "idle":
            replica, self.asked = self.asked or 0, None
            self.act(self.probation.idle(replica))
        elif event == "report" and self.claim is not None:
            reports, self.unreported = self.unreported, []
            self.act(self.probation.reported(self.claim.number, reports))
        elif event == "send":
            for path, at in list(self.at.items()):
                if at is None and path in self.granted:
                    self.at[path] = self.place if self.place in self.serving else None
                elif at is None and path not in self.held:
                    open_ones = sorted(self.serving - {self.place})
                    self.at[path] = self.rng.choice(open_ones) if open_ones else None
        elif self.serving:
            self.step(self.rng.choice(sorted(self.serving)))

    def step(self, replica: int) -> None:
        ready = sorted(path for path, at in self.at.items() if at == replica)
        run = self.rng.sample(ready, self.rng.randint(0, len(ready)))
        self.begun.update(run)
        if deadly := [path for path in run if path in self.poisons]:
            for path in deadly:
                self.deaths[path] = self.deaths.get(path, 0) + 1
            self.kill(replica)
            return
        for path in run:
            self.tokens[path] += 1
            if self.tokens[path] == LENGTH:
                self.end(path)
            elif path in self.held and self.tokens[path] >= self.held[path] + 2:
                del self.held[path]
                self.granted.discard(path)
                self.act(self.probation.passed([path]))

    def outside_kill(self) -> None:
        """Kill a replica for no request's sake, alone or with its host."""
        replica = self.rng.choice(sorted(self.serving))
        if self.rng.random() < 0.5:
            self.kill(replica, of_host=True)
            return
        begun = {path for path, at in self.at.items() if at == replica and path in self.begun}
        if len(begun) == 1:
            self.kills_alone |= begun
        self.kill(replica)


@settings(max_examples=400, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    num=st.integers(1, 40),
    num_poisons=st.integers(0, 2),
    num_kills=st.integers(0, 3),
    num_replicas=st.integers(1, 3),
)
def test_poisons_end_alone_and_innocents_complete(
    seed: int, num: int, num_poisons: int, num_kills: int, num_replicas: int
) -> None:
    rng = random.Random(seed)
    engine = Engine(rng, num_replicas, restarts=True)
    paths = [(rng.randrange(3), i) if rng.random() < 0.5 else (i,) for i in range(num)]
    engine.at = dict.fromkeys(paths)
    engine.tokens = dict.fromkeys(paths, 0)
    engine.poisons = set(rng.sample(paths, min(num, num_poisons)))
    kills = sorted((rng.randint(0, 150) for _ in range(num_kills)), reverse=True)
    aborts = {rng.choice(paths): rng.randint(0, 200) for _ in range(rng.randint(0, 3))}
    num_turns = 0
    while engine.at:
        num_turns += 1
        assert num_turns < 20000, (engine.probation, engine.at)
        if kills and num_turns > kills[-1] and engine.serving:
            kills.pop()
            engine.outside_kill()
        for path in [p for p, at in aborts.items() if at == num_turns and p in engine.at]:
            engine.end(path)
        engine.turn()
    assert set(engine.blamed) <= engine.poisons | engine.kills_alone, "innocents end with tokens"
    innocents = set(paths) - engine.poisons - set(engine.blamed) - aborts.keys()
    assert all(engine.tokens[path] == LENGTH for path in innocents)
    # A kill from outside may end the turn in which a poison would have shown itself.
    assert all(count <= 3 + num_kills for count in engine.deaths.values())
    if not num_kills:
        assert all(count <= 3 for count in engine.deaths.values())
    while engine.starting or engine.claim is not None and engine.claim.replica is not None:
        engine.turn()
        num_turns += 1
        assert num_turns < 30000, "the replica is given back at the end"


def test_a_group_is_narrowed_to_one_and_the_others_go_on() -> None:
    probation = Probation([0, 1])
    paths = [(i,) for i in range(10)]
    assert probation.died(0, returns=True) == [
        Claim(1, 0, ends_turn=True)
    ] and not probation.is_free(0)
    assert probation.reported(1, [(0, path) for path in paths]) == []
    assert probation.serves(0) == [AskIdle(0)]
    assert probation.idle(0) == [Run(tuple(paths[:8]))]
    assert probation.passed(paths[:2]) == [Park(tuple(paths[:2]))]
    assert probation.is_free(0) and not probation.is_free(1)
    assert probation.died(0, returns=True) == [Claim(2, 0, ends_turn=True)]
    # Two of the six others had not begun: they come behind the ones that had.
    assert probation.reported(2, [(0, path) for path in paths[2:6]]) == []
    assert probation.serves(0) == [AskIdle(0)]
    for path in paths[2:5]:
        assert probation.idle(0) == [Run((path,))]
        assert probation.passed([path]) == [Park((path,)), AskIdle(0)]
    assert probation.idle(0) == [Run((paths[5],))]
    assert probation.died(0, returns=True) == [Claim(3, 0, ends_turn=True)]
    assert probation.reported(3, [(0, paths[5])]) == [Blame(paths[5])]
    assert probation.serves(0) == [AskIdle(0)]
    assert probation.idle(0) == [Run(tuple(paths[6:8]))]
    assert probation.passed(paths[6:8]) == [Park(tuple(paths[6:8])), AskIdle(0)]
    assert probation.idle(0) == [Run(tuple(paths[8:]))]
    assert probation.passed(paths[8:]) == [Claim(4, None, ends_turn=True)]


def test_a_lost_replica_gives_way_to_one_that_serves_and_to_none_without_suspects() -> None:
    probation = Probation([0, 1])
    assert probation.died(0, returns=False) == [Claim(1, None, ends_turn=True)]
    assert probation.reported(1, []) == [], "the other replica is left alone"
    probation = Probation([0, 1])
    probation.died(0, returns=False)
    assert probation.reported(1, [(0, (5,))]) == [Claim(2, 1, ends_turn=True)]
    assert probation.reported(2, []) == [AskIdle(1)]
    assert probation.idle(1) == [Run(((5,),))]


def test_a_request_that_ran_beside_the_only_suspect_acquits_it() -> None:
    probation = Probation([0])
    probation.died(0, returns=True)
    probation.reported(1, [(0, (5,))])
    probation.serves(0)
    assert probation.idle(0) == [Run(((5,),))]
    assert probation.died(0, returns=True) == [Claim(2, 0, ends_turn=True)]
    assert probation.reported(2, [(0, (5,)), (0, (3, 1))]) == []
    assert probation.serves(0) == [AskIdle(0)]
    assert probation.idle(0) == [Run(((5,),))]


def test_a_machine_that_kills_whatever_runs_is_not_free_for_ever() -> None:
    probation = Probation([0])
    probation.died(0, returns=True)
    probation.reported(1, [(0, (i,)) for i in range(8)])
    free = 0
    for _ in range(8):
        probation.serves(0)
        run = probation.idle(0)[0]
        assert isinstance(run, Run)
        free += probation.is_free(0)
        probation.died(0, returns=True)
        probation.reported(probation.number, [(0, path) for path in run.suspects])
    assert free == MOST_FREE_DEATHS
