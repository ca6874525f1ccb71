"""Scheduler, KV manager and block pool under random load.

Nothing leaks, nothing is lost, and no token changes.
"""

from typing import Any, Literal

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sidestep.engine_core.requests.request import Request
from sidestep.executor.runner.fake import expected_tokens
from sidestep.ipc.common.registry import POLICIES
from sidestep.ipc.model.cache_groups import CacheGroups
from sidestep.ipc.params.beam_search_params import BeamSearchParams
from sidestep.ipc.params.structured_outputs_params import Grammar
from sidestep.ipc.transport.messages import unpack_ids
from tests.fakes import VOCAB_SIZE, Clock, Engine, make_beam_request, make_request, make_scheduler
from tests.small_grammars import SmallGrammars, small_grammar
from tests.unit.engine_core.groups.test_beams import search_alone

PREFIXES: tuple[list[int], ...] = (
    [],
    [1, 2, 3, 4, 5, 6, 7, 8],
    [1, 2, 3, 4, 9, 9, 9, 9, 9, 9, 9, 9],
)
FORMS = [
    small_grammar(regex) for regex in ("[a-d]{2,6}x", "(ab|c){1,9}", "a?b*c{0,3}", "[0-9]{30}")
]
LENGTHS = st.integers(1, 9)
BLAMED = "the engine cannot compute this request"
"""Part of the error of a request whose row a failed step has named."""
SPECULATIVE = st.one_of(
    st.none(),
    st.fixed_dictionaries(
        {
            "method": st.sampled_from(["ngram", "synthetic"]),
            "num_speculative_tokens": st.integers(1, 5),
            "prompt_lookup_min": st.integers(1, 3),
            "synthetic_acceptance_rate": st.sampled_from([0.0, 0.3, 0.7, 1.0]),
            "adaptive": st.booleans(),
        }
    ),
)
"""No drafts, looked up ones, and scripted ones: wrong ones, right ones and both."""
GROUPS = [
    CacheGroups(),
    CacheGroups(),
    CacheGroups(windows=(6,)),
    CacheGroups(windows=(1, 9)),
    CacheGroups(windows=(5,), has_full=False),
]
"""Models with full attention, some with windows as well, and one with windows alone."""
pytestmark = pytest.mark.timeout(600)
"""Seconds for a test, which takes half a minute where nothing else runs."""


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, aborts, deadlines and steps over a small cache.

    The cache is so small that preemption is common. The pipelines have one to three stages. The
    requests come from three frontends, which any policy may treat as it likes.
    """

    @initialize(
        num_blocks=st.integers(7, 14),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(5, 24),
        policy=st.sampled_from(sorted(POLICIES)),
        overlap=st.booleans(),
        num_stages=st.integers(1, 3),
        caching=st.sampled_from([True, True, False]),
        late_share=st.sampled_from([0.0, 0.3, 0.7]),
        mask_seconds=st.sampled_from([(0.0,), (1e-4, 0.015)]),
        speculative=SPECULATIVE,
        groups=st.sampled_from(GROUPS),
        states=st.sampled_from([None, None, 0, 1, 5]),
    )
    def start(
        self,
        num_blocks: int,
        max_num_seqs: int,
        budget: int,
        policy: str,
        overlap: bool,
        num_stages: int,
        caching: bool,
        late_share: float,
        mask_seconds: tuple[float, ...],
        speculative: dict[str, Any] | None,
        groups: CacheGroups,
        states: int | None,
    ) -> None:
        num_blocks *= 1 + len(groups.windows)
        self.clock = Clock()
        self.grammars = SmallGrammars(self.clock)
        self.grammars.late_share, self.grammars.mask_seconds = late_share, mask_seconds
        self.engine = Engine(
            make_scheduler(
                num_blocks=num_blocks,
                max_num_seqs=max_num_seqs,
                budget=budget,
                policy=policy,
                prefix_caching=caching,
                eos=(0,),
                clock=self.clock,
                overlap=overlap,
                grammars=self.grammars,
                num_stages=num_stages,
                speculative=speculative,
                groups=groups,
                # One for each request that runs at once, one to copy, and some more.
                num_states=0 if states is None else max_num_seqs + 1 + states,
            ),
            num_stages + overlap,
        )
        self.requests: dict[int, tuple[list[int], int]] = {}
        """Requests by handle; each choice of a group has its own."""
        self.clients: dict[int, int] = {}
        self.seeds: dict[int, int] = {}
        self.searches: dict[int, BeamSearchParams] = {}
        self.forms: dict[int, Grammar] = {}
        self.alone: set[int] = set()
        self.aborted: set[int] = set()

    @rule(
        prefix=st.sampled_from(PREFIXES),
        rest=LENGTHS,
        max_tokens=st.integers(1, 20),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, "salt"]),
        lifetime=st.sampled_from([None, None, None, 2.0]),
    )
    def arrive(
        self,
        prefix: list[int],
        rest: int,
        max_tokens: int,
        priority: int,
        salt: str | None,
        lifetime: float | None,
    ) -> None:
        self.add(prefix, rest, max_tokens, priority, salt, lifetime, 1)

    @rule(
        n=st.integers(2, 4),
        prefix=st.sampled_from(PREFIXES),
        rest=LENGTHS,
        max_tokens=st.integers(1, 20),
        priority=st.integers(0, 2),
        lifetime=st.sampled_from([None, None, None, 2.0]),
    )
    def group_arrives(
        self,
        n: int,
        prefix: list[int],
        rest: int,
        max_tokens: int,
        priority: int,
        lifetime: float | None,
    ) -> None:
        self.add(prefix, rest, max_tokens, priority, None, lifetime, n)

    @rule(
        n=st.sampled_from([1, 1, 2, 4]),
        form=st.sampled_from(FORMS),
        is_known=st.booleans(),
        prefix=st.sampled_from(PREFIXES),
        rest=LENGTHS,
        max_tokens=st.integers(1, 20),
        priority=st.integers(0, 2),
        lifetime=st.sampled_from([None, None, None, 2.0]),
    )
    def held_arrives(
        self,
        n: int,
        form: Grammar,
        is_known: bool,
        prefix: list[int],
        rest: int,
        max_tokens: int,
        priority: int,
        lifetime: float | None,
    ) -> None:
        """Add one request, or a group, that has a grammar.

        If the grammar is not known, it is compiled when the next step is scheduled.
        """
        if not is_known:
            self.grammars.forget_all()
        self.add(prefix, rest, max_tokens, priority, None, lifetime, n, form)

    @rule(
        width=st.integers(1, 4),
        prefix=st.sampled_from(PREFIXES),
        rest=LENGTHS,
        max_tokens=st.integers(1, 12),
        priority=st.integers(0, 2),
        stopping=st.sampled_from([True, False, "never"]),
        ignore_eos=st.booleans(),
    )
    def search_arrives(
        self,
        width: int,
        prefix: list[int],
        rest: int,
        max_tokens: int,
        priority: int,
        stopping: bool | Literal["never"],
        ignore_eos: bool,
    ) -> None:
        handle, prompt = len(self.requests), prefix + [1 + rest] * rest
        params = BeamSearchParams(
            beam_width=width, max_tokens=max_tokens, early_stopping=stopping, ignore_eos=ignore_eos
        )
        self.requests[handle] = (prompt, max_tokens)
        self.clients[handle] = rest % 3
        self.searches[handle] = params
        self.engine.scheduler.add(
            make_beam_request(
                prompt,
                params,
                handle=handle,
                client=rest % 3,
                priority=priority,
                arrival=self.clock.now,
            )
        )

    def add(
        self,
        prefix: list[int],
        rest: int,
        max_tokens: int,
        priority: int,
        salt: str | None,
        lifetime: float | None,
        n: int,
        form: Grammar | None = None,
    ) -> None:
        handle, prompt = len(self.requests), prefix + [1 + rest] * rest
        deadline = None if lifetime is None else self.clock.now + lifetime
        message = make_request(
            prompt,
            max_tokens,
            handle=handle,
            client=rest % 3,
            priority=priority,
            cache_salt=salt,
            arrival=self.clock.now,
            deadline=deadline,
            n=n,
            grammar=form,
        )
        for index in range(n):
            if form is not None:
                self.forms[handle + index] = form
            self.requests[handle + index] = (prompt, max_tokens)
            self.clients[handle + index] = message.client
            self.seeds[handle + index] = message.sampling.for_choice(index).seed or 0
        if n == 1:
            self.alone.add(handle)
        self.engine.scheduler.add(message)

    @rule(lengths=st.lists(LENGTHS, min_size=2, max_size=6), max_tokens=st.integers(4, 20))
    def many_arrive(self, lengths: list[int], max_tokens: int) -> None:
        for i, length in enumerate(lengths):
            self.arrive(PREFIXES[i % 2], length, max_tokens, i % 3, None, None)

    @precondition(lambda self: self.requests)
    @rule(back=st.integers(0, 4))
    def abort(self, back: int) -> None:
        handle = max(0, len(self.requests) - 1 - back)
        self.engine.scheduler.abort(self.clients[handle], [handle])
        if handle not in self.engine.finished:
            self.aborted.add(handle)

    @precondition(lambda self: self.requests)
    @rule(back=st.integers(0, 4), count=st.integers(2, 5))
    def abort_several(self, back: int, count: int) -> None:
        for step in range(count):
            self.abort(back + step)

    @rule()
    def launch(self) -> None:
        if self.engine.num_in_flight < self.engine.depth:
            self.engine.launch()

    @rule()
    def take(self) -> None:
        if self.engine.num_in_flight:
            self.engine.take()

    @rule(cause=st.sampled_from(["oom", "exception"]), named=st.sampled_from([None, None, 0, 1]))
    def fail(self, cause: Literal["oom", "exception"], named: int | None) -> None:
        """Lose all steps in flight; perhaps a row of the oldest is named."""
        if self.engine.num_in_flight:
            rows = self.engine.scheduler._plans[0].rows
            self.engine.fail(cause, -1 if named is None else rows[named % len(rows)].slot)

    @rule(turns=st.integers(1, 12))
    def run_a_while(self, turns: int) -> None:
        for _ in range(turns):
            self.engine.turn()

    @rule(seconds=st.floats(0.1, 2), reset=st.sampled_from([False, False, True]))
    def time_passes(self, seconds: float, reset: bool) -> None:
        self.clock.now += seconds
        if reset:
            self.engine.scheduler.reset_prefix_cache()

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "engine"):
            self.engine.scheduler.check_invariants()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.run()
        scheduler = self.engine.scheduler
        assert scheduler.kv.pool.num_used == 0, "blocks leaked"
        assert not scheduler.has_unfinished
        for handle, (prompt, max_tokens) in self.requests.items():
            self.check_request(handle, prompt, max_tokens)

    def check_request(self, handle: int, prompt: list[int], max_tokens: int) -> None:
        finish, got = self.engine.finished.get(handle), self.engine.tokens[handle]
        if handle in self.searches:
            self.check_search(handle, prompt)
            return
        if handle in self.forms:
            expected = self.grammars.expected_tokens(
                self.forms[handle], prompt, max_tokens, self.seeds[handle]
            )
        else:
            expected = expected_tokens(prompt, max_tokens, self.seeds[handle], VOCAB_SIZE)
            if 0 in expected:
                expected = expected[: expected.index(0) + 1]
        assert got == expected[: len(got)], f"request {handle} got other tokens than its own"
        if finish is None:
            assert handle in self.aborted, f"request {handle} never ended"
        elif str(finish.reason) == "stop":
            assert got == expected and finish.completes_grammar == (got[-1] != 0)
            assert handle in self.forms or not finish.completes_grammar
        elif str(finish.reason) == "length":
            # The request gets either all tokens that it asked for, or all that so small a cache can
            # hold, beside the others of its group.
            assert (
                len(got) == max_tokens
                or handle not in self.alone
                or len(prompt) + len(got) == self.engine.scheduler._max_model_len
            )
        elif BLAMED in str(finish.error):
            pass
        elif str(finish.reason) == "error":
            assert got == [] and (
                handle not in self.alone or len(prompt) + 1 > self.engine.scheduler._max_model_len
            )

    def check_search(self, handle: int, prompt: list[int]) -> None:
        finish, params = self.engine.finished.get(handle), self.searches[handle]
        assert self.engine.tokens[handle] == []
        if finish is None:
            assert handle in self.aborted, f"search {handle} never ended"
        elif BLAMED in str(finish.error):
            pass
        elif str(finish.reason) == "error":
            assert finish.beams == []
        else:
            room = self.engine.scheduler.kv.longest_of_group(
                Request.from_message(make_request(prompt), 4096, frozenset()), params.beam_width
            )
            room = min(room, self.engine.scheduler._max_model_len) - len(prompt)
            expected = search_alone(prompt, params, (0,), min(params.max_tokens, room))
            assert [unpack_ids(beam.token_ids).tolist() for beam in finish.beams] == expected


SchedulerMachine.TestCase.settings = settings(
    max_examples=160, stateful_step_count=50, deadline=None
)
TestSchedulerMachine = SchedulerMachine.TestCase


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(
        st.tuples(
            st.sampled_from(PREFIXES),
            st.lists(st.integers(1, 49), min_size=1, max_size=20),
            st.integers(1, 20),
        ),
        min_size=1,
        max_size=10,
    ),
    budget=st.integers(8, 64),
    block_size=st.sampled_from([1, 3, 4, 16]),
    num_tokens=st.integers(48, 200),
    overlap=st.booleans(),
    num_stages=st.integers(1, 3),
    caching=st.booleans(),
    stagger=st.integers(0, 3),
    speculative=SPECULATIVE,
    groups=st.sampled_from(GROUPS),
    states=st.sampled_from([None, None, 0, 3]),
)
def test_tokens_do_not_depend_on_batch_chunks_blocks_preemption_hits_overlap_stages_or_drafts(
    requests: list[tuple[list[int], list[int], int]],
    budget: int,
    block_size: int,
    num_tokens: int,
    overlap: bool,
    num_stages: int,
    caching: bool,
    stagger: int,
    speculative: dict[str, Any] | None,
    groups: CacheGroups,
    states: int | None,
) -> None:
    num_blocks = -(-num_tokens // block_size)
    assume(all(len(a) + len(b) + n <= num_blocks * block_size for a, b, n in requests))
    engine = Engine(
        make_scheduler(
            groups=groups,
            num_blocks=groups.most_blocks(num_tokens, block_size),
            block_size=block_size,
            budget=budget,
            prefix_caching=caching,
            overlap=overlap,
            num_stages=num_stages,
            speculative=speculative,
            num_states=0 if states is None else 9 + states,
        ),
        num_stages + overlap,
    )
    for handle, (prefix, rest, count) in enumerate(requests):
        engine.scheduler.add(make_request(prefix + rest, count, handle=handle))
        for _ in range(stagger):
            engine.turn()
    engine.run()
    for handle, (prefix, rest, count) in enumerate(requests):
        assert engine.tokens[handle] == expected_tokens(prefix + rest, count, handle, VOCAB_SIZE)
    assert engine.scheduler.kv.pool.num_used == 0
