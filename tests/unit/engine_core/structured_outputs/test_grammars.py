"""Grammars in the core.

The outputs fit their grammars, rows beside them do not change, and no failure spreads.
"""

from __future__ import annotations

import json
import random
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest

from sidestep.engine_core.core import EngineCore
from sidestep.engine_core.requests.request_checks import RequestChecks
from sidestep.engine_core.scheduling.scheduler import Scheduler
from sidestep.engine_core.structured_outputs.grammars import COMPILE_S, Grammars
from sidestep.executor.runner.fake import FakeRunner, expected_tokens
from sidestep.frontend.input.output_form import make_grammar
from sidestep.frontend.input.tokenizer import Tokenizer
from sidestep.ipc.config_sections import DEFAULT_MODEL
from sidestep.ipc.params.structured_outputs_params import Grammar, StructuredOutputsParams
from sidestep.ipc.transport.messages import FinishReason
from sidestep.ipc.transport.step import StepInput, StepMasks, StepOutput
from tests.fakes import Clock, Engine, make_request, make_scheduler, make_spec
from tests.random_schemas import REGEXES, random_schema
from tests.small_grammars import matcher_of
from tests.unit.engine_core.test_core import HandExecutor

VOCAB, EOS = 4096, (0, 2)
OBJECT = StructuredOutputsParams(
    json={
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 999, "minimum": 0}},
        "required": ["a"],
        "additionalProperties": False,
    }
)
LONG = StructuredOutputsParams(regex="([ab]{2} ){200}")


@pytest.fixture(scope="module")
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def grammars(clock: Clock) -> Grammars:
    return loaded(clock)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEFAULT_MODEL)


def loaded(clock: Callable[[], float], num_threads: int = 2, num_workers: int = 1) -> Grammars:
    made = Grammars(DEFAULT_MODEL, VOCAB, EOS, clock, num_threads, num_workers)
    made.load()
    return made


def grammar(params: StructuredOutputsParams) -> Grammar:
    return make_grammar(params, {})


def engine(grammars: Grammars, *, overlap: bool = True, **options: Any) -> Engine:
    sizes = {"num_blocks": 400, "block_size": 32, "max_num_seqs": 32, "budget": 512} | options
    scheduler = make_scheduler(
        grammars=grammars, eos=EOS, overlap=overlap, clock=grammars._clock, **sizes
    )
    return Engine(scheduler, depth=scheduler._limits.max_steps_in_flight, vocab_size=VOCAB)


def text_of(run: Engine, handle: int, tokenizer: Tokenizer) -> str:
    finish = run.finished[handle]
    assert finish.reason == FinishReason.STOP, f"{handle}: {finish}"
    tokens = run.tokens[handle]
    return tokenizer.decode(
        tokens if finish.completes_grammar else tokens[:-1], skip_special_tokens=False
    )


def run_all(run: Engine, forms: list[StructuredOutputsParams], max_tokens: int = 3000) -> None:
    for handle, params in enumerate(forms):
        run.scheduler.add(
            make_request([5, 6, handle % 50], max_tokens, handle=handle, grammar=grammar(params))
        )
    run.run(100_000)


@pytest.mark.parametrize("part", range(4))
def test_samples_of_random_schemas_are_valid(
    part: int, grammars: Grammars, tokenizer: Tokenizer
) -> None:
    rng = random.Random(part)
    schemas = [random_schema(rng) for _ in range(250)]
    run = engine(grammars)
    run_all(
        run,
        [
            StructuredOutputsParams(json=schema, disable_any_whitespace=i % 2 == 0)
            for schema in schemas
            for i in range(2)
        ],
    )
    for handle in range(2 * len(schemas)):
        schema, text = schemas[handle // 2], text_of(run, handle, tokenizer)
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


def test_regexes_choices_and_grammars_are_kept_to(grammars: Grammars, tokenizer: Tokenizer) -> None:
    choices = ["red", "redder", 'gr"ün\n', "blue \\ x"]
    forms = [StructuredOutputsParams(regex=regex) for regex in REGEXES for _ in range(30)]
    forms += [StructuredOutputsParams(choice=choices)] * 60
    lark = 'start: sum\nsum: NUMBER (" + " NUMBER)~1..3\nNUMBER: /[0-9]{1,3}/'
    gbnf = 'root ::= item{1,4} "."\nitem ::= "x" [0-9] | "y"'
    forms += [StructuredOutputsParams(grammar=lark)] * 20 + [
        StructuredOutputsParams(grammar=gbnf)
    ] * 20
    run = engine(grammars)
    run_all(run, forms)
    told = set()
    for handle, params in enumerate(forms):
        text = text_of(run, handle, tokenizer)
        if params.choice is not None:
            told.add(text)
        else:
            own = params.regex or (
                r"\d{1,3}( \+ \d{1,3}){1,3}" if params.grammar == lark else r"(x[0-9]|y){1,4}\."
            )
            assert re.fullmatch(own, text), (own, text)
    assert told == set(choices)


def test_structural_tags_constrain_what_is_inside(grammars: Grammars, tokenizer: Tokenizer) -> None:
    tag = {
        "type": "structural_tag",
        "triggers": ["<f="],
        "structures": [
            {
                "begin": "<f=get>",
                "schema": {
                    "type": "object",
                    "properties": {"n": {"type": "integer"}},
                    "required": ["n"],
                    "additionalProperties": False,
                },
                "end": "</f>",
            }
        ],
    }
    form = grammar(StructuredOutputsParams(structural_tag=tag))
    scheduler = make_scheduler(grammars=grammars, eos=EOS, clock=grammars._clock)
    run = Engine(scheduler, vocab_size=VOCAB)
    scheduler.add(make_request([1], 8, grammar=form))
    run.run()
    request = make_request([1], 8, handle=1, grammar=form)
    scheduler.add(request)
    matcher = matcher_of(scheduler._requests[0, 1])
    for text, fits in [("free text ", True), ('<f=get>{"n":', True), ('"x"', False)]:
        ids = tokenizer.encode(text)
        assert (matcher.validate_tokens(ids) == len(ids)) == fits, text
        if fits:
            matcher.consume_tokens(ids)
    scheduler.abort(0, [1])


@pytest.mark.parametrize("begin", [None, "<think>"])
def test_the_form_holds_after_the_reasoning(
    begin: str | None, grammars: Grammars, tokenizer: Tokenizer
) -> None:
    params = StructuredOutputsParams(
        json_object=True, reasoning_begin=begin, reasoning_end="</think>"
    )
    run = engine(grammars)
    run.scheduler.add(make_request([1], 9, grammar=grammar(params)))
    run.run()
    run.scheduler.add(make_request([1], 9, handle=1, grammar=grammar(params)))
    matcher = matcher_of(run.scheduler._requests[0, 1])
    reasoning = "so {what}? \n</think>\n\n{}"
    fits = [
        ((begin or "") + reasoning, True),
        (reasoning, begin is None),
        ("{}", begin is not None),
    ]
    for text, accepted in fits:
        ids = tokenizer.encode(text)
        follower = matcher.deep_copy()
        assert (follower.consume_tokens(ids) and follower.is_accepting()) == accepted, text
    run.scheduler.abort(0, [1])


def mixed(run: Engine) -> None:
    """Run plain requests between those with a grammar."""
    for handle in range(24):
        form = None if handle % 2 else grammar([OBJECT, LONG][handle // 2 % 2])
        count = 45 if form is None else 40
        run.scheduler.add(
            make_request(
                list(range(handle % 7 + 1)),
                count,
                handle=handle,
                grammar=form,
                ignore_eos=form is None,
            )
        )
    run.run()


def test_neighbours_and_overlap_change_no_token(grammars: Grammars) -> None:
    run_all(engine(grammars), [OBJECT, LONG], 3)  # known from now on: no plain request ends before
    runs = [
        engine(grammars),
        engine(grammars, overlap=False),
        engine(grammars, max_num_seqs=3, budget=5),
        engine(grammars, num_stages=2),
        engine(grammars, num_stages=3, overlap=False),
    ]
    for run in runs:
        mixed(run)
        assert run.tokens == runs[0].tokens and run.finished.keys() == runs[0].finished.keys()
    for handle in range(1, 24, 2):
        assert runs[0].tokens[handle] == expected_tokens(range(handle % 7 + 1), 45, handle, VOCAB)
    masked = [step for step in runs[0].steps if step.awaits_masks]
    assert 0 < len(masked) < len(runs[0].steps)


def test_a_preempted_request_goes_on_where_its_grammar_was(grammars: Grammars) -> None:
    runs = [engine(grammars), engine(grammars, num_blocks=20, block_size=4)]
    for run in runs:
        for handle in range(8):
            run.scheduler.add(make_request([handle] * 6, 30, handle=handle, grammar=grammar(LONG)))
        run.run()
    assert runs[1].scheduler.stats()["num_preemptions"] > 0
    assert runs[0].tokens == runs[1].tokens


def test_aborts_at_every_turn(grammars: Grammars, tokenizer: Tokenizer) -> None:
    for turn in range(7):
        run = engine(grammars)
        for handle in range(4):
            form = grammar(OBJECT if handle else LONG)
            run.scheduler.add(make_request([1, 2, 3], 400, handle=handle, grammar=form))
        for _ in range(turn):
            run.turn()
        run.launch()
        run.scheduler.abort(0, [0])
        run.run()
        assert 0 not in run.finished and run.scheduler.kv.pool.num_used == 0
        assert all(json.loads(text_of(run, handle, tokenizer)) for handle in (1, 2, 3))


def test_others_pass_a_request_whose_grammar_is_being_compiled(clock: Clock) -> None:
    """Let no thread compile, so the grammar takes as long as it can."""
    run = engine(loaded(clock, num_threads=0))
    run.scheduler.add(make_request([1, 2], 5, handle=0, grammar=grammar(OBJECT)))
    run.scheduler.add(make_request([1, 2], 5, handle=1))
    while 1 not in run.finished:
        run.launch()
        run.take()
    (record,) = [r for r in run.scheduler.request_records() if r.request_id == "request 0"]
    assert (record.status, record.waiting_for) == ("waiting", "grammar")
    assert run.scheduler.stats()["num_waiting"] == 1
    # In the end it takes too long.
    assert run.scheduler.next_deadline() == clock.now + COMPILE_S
    clock.now += COMPILE_S
    run.launch()
    run._note(run.scheduler.take_outputs())
    assert run.finished[0].reason == FinishReason.ERROR
    assert run.finished[0].error == "takes longer than 10 s to compile"
    assert run.finished[0].field == "structured_outputs.json"
    assert not run.scheduler.has_unfinished and run.scheduler.next_deadline() is None


def test_requests_end_while_their_grammar_is_being_compiled(clock: Clock) -> None:
    run = engine(loaded(clock, num_threads=0))
    for handle in range(3):
        run.scheduler.add(
            make_request(
                [1],
                5,
                handle=handle,
                client=handle % 2,
                grammar=grammar(OBJECT),
                deadline=clock.now + 1 if handle == 2 else None,
            )
        )
    run.scheduler.abort(0, [0])
    run.scheduler.abort_client(1)
    clock.now += 1
    run._note(run.scheduler.take_outputs())
    assert run.finished.keys() == {2} and run.finished[2].stop_reason == "deadline"
    assert not run.scheduler.has_unfinished


def test_a_grammar_is_compiled_once_and_again_after_an_abort(clock: Clock) -> None:
    own = loaded(clock)
    run = engine(own)
    for handle in range(5):
        run.scheduler.add(make_request([1], 9, handle=handle, grammar=grammar(OBJECT)))
    run.scheduler.abort(0, [0])
    assert own.num_compiling == 1
    run.run()
    assert run.finished.keys() == {1, 2, 3, 4}
    run.scheduler.add(make_request([1], 9, handle=9, grammar=grammar(OBJECT)))
    assert own.num_compiling == 0, "it is known"
    run.run()


@pytest.mark.parametrize("num_workers", [2, 4])
def test_many_requests_of_one_grammar_share_a_few_compilations(
    num_workers: int, clock: Clock, grammars: Grammars, tokenizer: Tokenizer
) -> None:
    own = loaded(clock, num_workers=num_workers)
    runs = [engine(own), engine(grammars)]
    for run in runs:
        run_all(run, [OBJECT] * 60, 400)
    assert runs[0].tokens == runs[1].tokens
    ((known),) = own._cache.values()
    assert [compiled.uses for compiled in known] == pytest.approx(
        [60 / num_workers] * num_workers, abs=8
    )


def test_what_is_compiled_is_bounded(clock: Clock) -> None:
    own = loaded(clock)
    run = engine(own)
    run_all(run, [StructuredOutputsParams(choice=[f"a{i}"]) for i in range(150)])
    assert len(own._cache) == 128


def test_a_grammar_that_is_wrong_fails_its_request_alone(grammars: Grammars) -> None:
    run = engine(grammars)
    run.scheduler.add(
        make_request([1], 9, handle=0, grammar=Grammar("structured_outputs.regex", "start: /(/"))
    )
    run.scheduler.add(make_request([1], 400, handle=1, grammar=grammar(OBJECT)))
    run.run()
    assert run.finished[0].reason == FinishReason.ERROR
    assert run.finished[0].field == "structured_outputs.regex" and run.finished[0].error
    assert run.finished[1].reason == FinishReason.STOP


def test_a_token_of_an_ambiguous_grammar_may_cost_so_much_and_no_more(grammars: Grammars) -> None:
    run = engine(grammars)
    hostile = StructuredOutputsParams(grammar="start: s\ns: s s | /[a-z]/")
    plain = [make_request([1, 2], 200, handle=handle, ignore_eos=True) for handle in (1, 2)]
    for request in plain:
        run.scheduler.add(request)
    for handle in range(3, 7):
        run.scheduler.add(make_request([handle], 3000, handle=handle, grammar=grammar(hostile)))
    run.run()
    failed = [finish for finish in run.finished.values() if finish.reason == FinishReason.ERROR]
    assert failed
    for finish in failed:
        assert finish.field == "structured_outputs.grammar" and "Too many items" in (
            finish.error or ""
        )
    for handle in (1, 2):
        assert run.tokens[handle] == expected_tokens([1, 2], 200, handle, VOCAB)


def test_steps_go_on_while_a_large_schema_compiles(clock: Clock) -> None:
    """Let threads run: a library that held the interpreter's lock would block them."""
    own = loaded(clock)
    run = engine(own)
    large = {
        "type": "object",
        "properties": {f"property {i}": {"type": "string"} for i in range(1500)},
    }
    run.scheduler.add(make_request([1, 2], 9000, handle=1, ignore_eos=True))
    run.turn()
    run.scheduler.add(
        make_request([1], 5, handle=0, grammar=grammar(StructuredOutputsParams(json=large)))
    )
    num_steps = 0
    while own.num_compiling:
        num_steps += 1
        run.turn()
    assert num_steps > 10
    run.scheduler.abort(0, [0, 1])
    run.run()


@pytest.mark.parametrize(
    "folder, eos, problem",
    [
        ("/nowhere", EOS, "tokenizer cannot be used"),
        (DEFAULT_MODEL, (), "names no end-of-sequence token"),
    ],
)
def test_a_model_without_what_grammars_need_says_so(
    folder: str, eos: tuple[int, ...], problem: str
) -> None:
    own = Grammars(folder, VOCAB, eos, Clock())
    own.load()
    run = engine(own)
    run.scheduler.add(make_request([1], 9, handle=0, grammar=grammar(OBJECT)))
    run.scheduler.add(make_request([1], 9, handle=1))
    run.run()
    assert run.finished[0].reason == FinishReason.ERROR and problem in (run.finished[0].error or "")
    assert len(run.tokens[1]) == 9


class Deaf(FakeRunner):
    """A runner that ignores masks."""

    def execute(self, step: StepInput, receive_masks: Callable[[], StepMasks] | None = None) -> Any:
        masks = StepMasks(step.step_id, 0, step.slots[:0], step.slots[:0], step.slots[:0])
        return super().execute(step, lambda: masks)


def test_a_token_that_the_grammar_forbids_is_never_told(grammars: Grammars) -> None:
    run = engine(grammars)
    run.runner.__class__ = Deaf
    run.scheduler.add(make_request([1, 2, 3], 9, handle=0, grammar=grammar(LONG)))
    run.scheduler.add(make_request([1, 2, 3], 9, handle=1))
    run.run()
    assert run.finished[0].reason == FinishReason.ERROR and 0 not in run.tokens
    assert "doesn't satisfy the grammar" in (run.finished[0].error or "")
    assert len(run.tokens[1]) == 9


class Wire(HandExecutor):
    """An executor that notes the order of messages.

    A step runs when the test says so, with its masks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[tuple[str, int]] = []
        self._steps: deque[StepInput] = deque()
        self._masks: dict[int, StepMasks] = {}

    def submit(self, step: StepInput) -> None:
        self.messages.append(("step", step.step_id))
        self._steps.append(step)

    def submit_masks(self, masks: StepMasks) -> None:
        self.messages.append(("masks", masks.step_id))
        self._masks[masks.step_id] = masks

    def finish_step(self) -> None:
        step = self._steps.popleft()
        output: StepOutput = self.runner.execute(step, lambda: self._masks[step.step_id]).wait()
        self.done.append(output)


@pytest.mark.parametrize(
    ("num_stages", "overlap"), [(1, False), (1, True), (2, True), (3, True), (3, False)]
)
def test_masks_follow_their_step_and_come_before_the_one_after(
    num_stages: int, overlap: bool, grammars: Grammars
) -> None:
    run = engine(grammars, num_stages=num_stages, overlap=overlap)
    scheduler: Scheduler = run.scheduler
    executor = Wire()
    executor.runner = run.runner
    core = EngineCore(
        scheduler,
        executor,
        RequestChecks(make_spec(vocab_size=run.vocab_size)),
        max_steps_in_flight=num_stages + overlap,
        clock=grammars._clock,
    )
    scheduler.add(make_request([1], 9, grammar=grammar(LONG)))
    run.run()
    core.handle(make_request([1, 2, 3], 6, handle=1, grammar=grammar(LONG)))
    core.handle(make_request([1, 2, 3], 20, handle=2))
    while scheduler.has_unfinished:
        core.step()
        if core.in_flight:
            executor.finish_step()
    masked = [
        (position, step)
        for position, (kind, step) in enumerate(executor.messages)
        if kind == "masks"
    ]
    assert len({step for _, step in masked}) == len(masked) == 6
    assert all(executor.messages[position - 1] == ("step", step) for position, step in masked)


@pytest.fixture(autouse=True)
def no_thread_fails() -> Iterator[None]:
    """Fail the test if a compiling thread raised: its requests would wait."""
    failures: list[threading.ExceptHookArgs] = []
    before, threading.excepthook = threading.excepthook, failures.append
    yield
    threading.excepthook = before
    assert not failures
