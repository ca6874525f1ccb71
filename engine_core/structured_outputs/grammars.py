"""Grammars in the core: compiled by threads, followed token by token, and turned into masks.

A mask has a bit for each token that is allowed next. The library releases the interpreter lock
while it compiles and computes masks, so a grammar that takes long holds up neither the loop nor
other requests; its own limits end it. Reading a tokenizer does hold the lock, for up to seconds, so
that happens while the workers load the model and never later. All methods are for the core's
thread.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sidestep.engine_core.requests.grammar_state import GrammarState
from sidestep.engine_core.requests.life import RequestStatus
from sidestep.engine_core.requests.mask_account import MaskAccount
from sidestep.engine_core.requests.request import Request, grammars_of
from sidestep.engine_core.structured_outputs.draft_masks import cheap_drafts, masks_behind
from sidestep.engine_core.structured_outputs.grammar_costs import COUNTED_S, GRAMMAR_S, REQUEST_S
from sidestep.engine_core.structured_outputs.mask_jobs import MaskJobs
from sidestep.ipc.config import available_cores
from sidestep.ipc.params.structured_outputs_params import Grammar, first_line, grammar_limits
from sidestep.ipc.transport.step import Int32

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

COMPILE_S = 10.0
"""Seconds after which a request no longer waits for its grammar."""
_CACHED = 128
"""Grammars that are kept compiled."""
_SHARERS = 8
"""Requests for which one compilation is enough.

Its knowledge of tokens serves all of them, but their masks are computed one after the other. So
with more requests there are more compilations, up to one for each thread.
"""
_CHEAP_S = 0.05
"""Seconds of compiling beyond which all requests share one compilation."""
_STRING = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_STRING}{{1,{n}}}" for n in (3, 5, 7, 9, 12, 16, 22, 30)),
    f"{_STRING}+",
]
"""Kinds of tokens that the library looks at as one where all of a kind may follow.

A string that may go on for n characters allows all shorter tokens, so that with many lengths few of
the tokens are looked at one by one.
"""
_MOST_REASON = 120
"""Characters of the library's message that a refusal shows."""
_ACCOUNTS = 1024
"""Number of grammars for which the time of their masks is remembered."""
_USES = 256
"""Requests after which a compilation is made anew, because what it has learnt only grows."""


@dataclass(slots=True, eq=False)
class _Waiting:
    request: Request
    deadline: float

    @property
    def waits(self) -> bool:
        return self.request.lacks_matcher and self.request.status is RequestStatus.WAITING


@dataclass(slots=True, eq=False)
class _Compilation:
    """A grammar that is being compiled, and the requests that wait for it."""

    text: str
    waiting: list[_Waiting] = field(default_factory=list)
    matcher: LLMatcher | None = None
    seconds: float = 0.0
    mask_s: float = 0.0
    """Seconds of a processor that the first mask took."""
    error: str = ""

    def compile(self, tokenizer: LLTokenizer) -> None:
        """Get its matcher, or its error. A compiling thread calls it."""
        from llguidance import LLMatcher

        begin = time.perf_counter()
        try:
            matcher = LLMatcher(tokenizer, self.text, limits=grammar_limits(), log_level=0)
            begin_mask = time.thread_time()
            matcher.compute_bitmask()  # the first mask takes longest
            self.mask_s = time.thread_time() - begin_mask
            self.error = problem_of(matcher) or ""
        except BaseException as error:  # a panic of the library is one, and the thread must go on
            self.error = f"{type(error).__name__}: {error}"
        self.seconds = time.perf_counter() - begin
        if not self.error:
            self.matcher = matcher


@dataclass(slots=True, eq=False)
class _Compiled:
    text: str
    matcher: LLMatcher
    """Matcher at the beginning of the grammar; each request gets a copy."""
    number: int
    """Number of the compilation."""
    is_cheap: bool
    mask_s: float
    """Seconds of a processor that its first mask took."""
    uses: int = 0


class _Bell:
    """Pipe that wakes the loop that polls `ears`.

    The threads that ring it hold it too, so it exists as long as one of them.
    """

    def __init__(self) -> None:
        self.ears, self._rope = os.pipe()
        os.set_blocking(self.ears, False)

    def __del__(self) -> None:
        os.close(self.ears)
        os.close(self._rope)

    def ring(self) -> None:
        os.write(self._rope, b"\0")

    def hear(self) -> int:
        """Return how often it has rung since the last call, as far as can be read at once."""
        try:
            return len(os.read(self.ears, 4096))
        except BlockingIOError:
            return 0


class Grammars:
    """Matchers of requests with a grammar."""

    def __init__(
        self,
        folder: str | None,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        clock: Callable[[], float],
        num_threads: int = 2,
        num_workers: int | None = None,
    ) -> None:
        """Begin without a tokenizer. Call `load` before the first request.

        folder: folder of the tokenizer's files; None if there is none. num_threads: threads that
        compile. num_workers: threads that compute masks; None for as many as the cores allow.
        """
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)
        self._clock = clock
        self._tokenizer: LLTokenizer | None = None
        self._executor: LLExecutor | None = None
        self._problem = "the engine has not loaded the tokenizer"
        """Why there is no tokenizer."""
        self._cache: OrderedDict[str, list[_Compiled]] = OrderedDict()
        self._accounts: OrderedDict[str, MaskAccount] = OrderedDict()
        """Accounts by grammar, the one used last at the end."""
        self._num_compiled = 0
        self._num_workers = num_workers or max(1, min(8, available_cores() // 2))
        self._compiling: dict[str, _Compilation] = {}
        self._deadlines: deque[_Waiting] = deque()
        self._jobs: queue.SimpleQueue[_Compilation] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[_Compilation] = queue.SimpleQueue()
        self._bell = _Bell()
        self._num_jobs = 0
        """Compilations whose end the bell has not reported yet."""
        self._num_threads = num_threads
        self._has_threads = False
        self._masks = MaskJobs(-(-vocab_size // 32), None)

    def __repr__(self) -> str:
        return f"Grammars({len(self._cache)} cached, {len(self._compiling)} compiling)"

    def load(self) -> None:
        """Read the tokenizer.

        If that fails, only the requests that need it get the reason.
        """
        from llguidance import LLExecutor, LLTokenizer

        if self._folder is None:
            self._problem = "this engine was started without a tokenizer (skip_tokenizer_init)"
            return
        if not self._eos:
            self._problem = "the model names no end-of-sequence token"
            return
        try:
            file = Path(self._folder) / "tokenizer.json"
            self._tokenizer = LLTokenizer(
                file.read_text(encoding="utf-8"),
                n_vocab=self._vocab_size,
                eos_token=self._eos,
                slices=_SLICES,
            )
            # One thread has no other to share the masks with, and waking it takes longer than most
            # masks.
            if self._num_workers > 1:
                self._executor = LLExecutor(self._num_workers)
                self._masks = MaskJobs(
                    -(-self._vocab_size // 32), self._executor, self._num_workers
                )
        except Exception as error:  # the library raises nothing more special
            reason = f"{error}".partition("\n")[0][:_MOST_REASON]  # it may show all its settings
            self._problem = f"the model's tokenizer cannot be used for grammars: {reason}"

    # Compiling.

    def fileno(self) -> int:
        """Return a descriptor that is readable when `take_compiled` has something."""
        return self._bell.ears

    @property
    def num_workers(self) -> int:
        """Number of threads that compute the masks of a step."""
        return self._num_workers

    @property
    def num_compiling(self) -> int:
        """Grammars that are being compiled, or wait for it."""
        return len(self._compiling)

    def start(
        self, request: Request, grammar: Grammar, account: MaskAccount | None = None
    ) -> str | None:
        """Give the request its matcher, or have it compiled: then `take_compiled` will return it.

        account: the account that its masks are charged to, beside that of the grammar. Return why
        it can have no matcher; None if it can.
        """
        request.restrict(GrammarState(grammar.field, account))
        if self._tokenizer is None:
            return self._problem
        if (known := self._accounts.get(grammar.text)) is not None and (
            problem := known.problem()
        ) is not None:
            return problem
        if self._use(grammar.text, request):
            return None
        compilation = self._compiling.get(grammar.text)
        if compilation is None:
            compilation = _Compilation(grammar.text)
            self._start_threads()
            self._give(compilation)
        waiting = _Waiting(request, self._clock() + COMPILE_S)
        compilation.waiting.append(waiting)
        self._deadlines.append(waiting)
        return None

    def next_deadline(self) -> float | None:
        """Return the latest time for `take_compiled`, on the given clock; None for no limit."""
        while self._deadlines and not self._deadlines[0].waits:
            self._deadlines.popleft()
        return self._deadlines[0].deadline if self._deadlines else None

    def take_compiled(self) -> list[tuple[Request, str | None]]:
        """Return the requests whose wait has ended, each with its problem; None for no problem."""
        if not self._num_jobs:
            return []
        ended: list[tuple[Request, str | None]] = []
        self._num_jobs -= self._bell.hear()
        while not self._done.empty():
            compilation = self._done.get()
            if compilation.matcher is not None:
                self._remember(compilation, compilation.matcher)
            waiting = [w for w in compilation.waiting if w.waits]
            if compilation.error:
                ended += [(w.request, compilation.error) for w in waiting]
                waiting = []
            ended += [(w.request, None) for w in waiting if self._use(compilation.text, w.request)]
            # Some are left if they are too many for one, or if none waited when its turn came.
            if left := [w for w in waiting if w.waits]:
                self._give(replace(compilation, waiting=left, matcher=None))
            else:
                del self._compiling[compilation.text]
        while (deadline := self.next_deadline()) is not None and deadline <= self._clock():
            late = self._deadlines.popleft()
            ended.append((late.request, f"takes longer than {COMPILE_S:g} s to compile"))
        return ended

    def _give(self, compilation: _Compilation) -> None:
        self._num_jobs += 1
        self._compiling[compilation.text] = compilation
        self._jobs.put(compilation)

    def _use(self, text: str, request: Request) -> bool:
        """Give the request its matcher. Return False if it must be compiled for it first."""
        known = self._cache.get(text)
        if known is None:
            return False
        least = min(known, key=lambda compiled: compiled.uses)
        if least.uses >= _SHARERS and least.is_cheap and len(known) < self._num_workers:
            return False
        matcher = least.matcher.deep_copy()
        if request.num_outputs:  # outputs of a replica that has died
            matcher.consume_tokens(request.token_ids[request.num_prompt :])
        assert request.grammar is not None, f"{request} has not been started"
        request.grammar.begin(
            matcher,
            text=least.text,
            compilation=least.number,
            mask_s=least.mask_s,
            account=self._account_of(text),
        )
        least.uses += 1
        self._cache.move_to_end(text)
        if least.uses >= _USES:
            known.remove(least)
            if not known:
                del self._cache[text]
        return True

    def _remember(self, compilation: _Compilation, matcher: LLMatcher) -> None:
        self._num_compiled += 1
        self._cache.setdefault(compilation.text, []).append(
            _Compiled(
                compilation.text,
                matcher,
                self._num_compiled,
                compilation.seconds < _CHEAP_S,
                compilation.mask_s,
            )
        )
        if len(self._cache) > _CACHED:
            self._cache.popitem(last=False)

    def _start_threads(self) -> None:
        if not self._has_threads:
            self._has_threads = True
            for i in range(self._num_threads):
                threading.Thread(
                    target=_compile_all,
                    name=f"grammar {i}",
                    daemon=True,
                    args=(self._tokenizer, self._jobs, self._done, self._bell),
                ).start()

    # Time of the masks.

    def open_account(self) -> MaskAccount:
        """Return an account for the masks of a request, shared by all of its choices."""
        return MaskAccount("the request", REQUEST_S, self._clock)

    def _account_of(self, text: str) -> MaskAccount:
        account = self._accounts.get(text)
        if account is None:
            account = self._accounts[text] = MaskAccount(
                "all requests with this grammar", GRAMMAR_S, self._clock
            )
            if len(self._accounts) > _ACCOUNTS:
                self._accounts.popitem(last=False)
        self._accounts.move_to_end(text)
        return account

    # Tokens.

    def advance(self, tokens: list[tuple[LLMatcher, int]]) -> None:
        """Let each matcher take one sampled token."""
        if self._executor is not None and tokens:  # it takes no empty list
            self._executor.consume_token_par(tokens)
            return
        for matcher, token in tokens:
            matcher.consume_token(token)

    def masks_behind_drafts(
        self, grammars: Sequence[GrammarState], most: Sequence[int]
    ) -> list[Sequence[Int32]]:
        """Return the masks behind the drafts of each grammar's request that its row may accept.

        most: drafts that each row may verify at most. Call it after `masks`, for requests whose
        mask has been taken.
        """
        drafts = cheap_drafts(grammars, most, self._num_workers)
        return masks_behind(grammars, drafts, -(-self._vocab_size // 32), self._executor)

    def masks(
        self, requests: Sequence[Request], most_late: int, patience_s: float, longest_s: float
    ) -> list[Int32 | None]:
        """Return a mask of the tokens that each request may sample next, [ceil(vocab_size / 32)].

        A mask has a bit a token, the lowest first. It is None for a request whose mask was not
        computed in time; a later call returns it. At most `most_late` masks are late after
        `patience_s`, and any number after `longest_s`.
        """
        return self._masks.compute(grammars_of(requests), most_late, patience_s, longest_s)

    def charge(self, request: Request) -> str | None:
        """Charge the time of the request's last mask to its accounts, if it is worth counting.

        Return why it may have no more masks; None if it may.
        """
        grammar = request.grammar
        return None if grammar is None or grammar.mask_s <= COUNTED_S else grammar.charge()


def follow(matcher: LLMatcher, tokens: Sequence[int]) -> int:
    """Give a matcher a row's tokens; return the index of the one that ends its grammar.

    Return -1 if the grammar goes on. A row of one token has been given by `Grammars.advance`.
    """
    for index, token in enumerate(tokens):
        if len(tokens) > 1:
            matcher.consume_token(token)
        if matcher.is_stopped():
            return index
    return -1


def problem_of(matcher: LLMatcher) -> str | None:
    """Return what went wrong while a matcher was followed, in one line; None for nothing."""
    if not matcher.is_error():
        return None
    return first_line(matcher.get_error())


def _compile_all(
    tokenizer: LLTokenizer,
    jobs: queue.SimpleQueue[_Compilation],
    done: queue.SimpleQueue[_Compilation],
    bell: _Bell,
) -> None:
    """Run a compiling thread, until the process ends."""
    while True:
        job = jobs.get()
        if any(w.waits for w in job.waiting):
            job.compile(tokenizer)
        done.put(job)
        bell.ring()
