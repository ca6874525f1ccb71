"""Runs a fault plan against an engine with real processes, and returns what went wrong.

Nothing waits for a guessed time. Clients wait for one another's outputs, and what never comes is a
problem of the plan after `LIMIT_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import psutil

from sidestep import AsyncLLM, EngineArgs, EngineDeadError, EngineStalledError, RequestError
from tests.integration.faults.asks import Ask, Reference
from tests.integration.faults.history import History
from tests.integration.faults.plans import POISON, Plan, causes
from tests.waiting import until

LIMIT_S = 60.0
"""Seconds for all clients of a plan. They need one or two; a hang takes all."""


class Run:
    """One run of a plan."""

    def __init__(self, plan: Plan, folder: str, reference: Reference) -> None:
        """Start nothing yet. folder: the model's."""
        self._plan, self._folder, self._reference = plan, folder, reference
        self._histories: list[History] = []
        self._begun: list[asyncio.Event] = [asyncio.Event() for _ in plan.asks]
        """By ask: its first output, or its end, has come."""
        self._problems: list[str] = []
        self.num_restarts = 0
        """Starts of replicas after deaths."""

    async def run(self) -> list[str]:
        """Run the plan, and return what was wrong."""
        before = set(psutil.Process().children(recursive=True))
        plan = self._plan
        with _own_folder() as folder:
            llm = AsyncLLM.from_engine_args(
                EngineArgs(
                    model=self._folder,
                    device="fake",
                    fake_faults=msgspec.to_builtins(plan.fault_plan),
                    **plan.options,
                )
            )
            frontends = [llm]
            try:
                for _ in range(1, plan.num_frontends):
                    frontends.append(AsyncLLM.join(await llm.invite()))
                await self._serve(frontends)
            finally:
                children = set(psutil.Process().children(recursive=True)) - before
                for each in reversed(frontends):
                    each.shutdown()
            _, orphans = psutil.wait_procs(children, timeout=LIMIT_S)
            if orphans:
                self._problems.append(f"processes are left: {orphans}")
            if left := os.listdir(folder):
                self._problems.append(f"files are left: {left}")
        return self._problems

    @property
    def blamed(self) -> list[Ask]:
        """The requests that ended as the cause of a death."""
        return [
            each.ask for each in self._histories if "the cause is this request" in str(each.error)
        ]

    async def _serve(self, frontends: Sequence[AsyncLLM]) -> None:
        """Serve all clients, then one of each frontend, and check what they got."""
        leaving = asyncio.create_task(self._leave(frontends))
        try:
            await self._ask_all(frontends, self._plan.asks)
            if not frontends[0].errored:
                self._begun += [asyncio.Event() for _ in frontends]
                last = [
                    Ask(prompt=[9, 8, 7], max_tokens=5, seed=i, frontend=i)
                    for i in range(len(frontends))
                    if i != self._plan.leaver
                ]
                await self._ask_all(frontends, last)
            await self._check_leaks(frontends)
        finally:
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
        self.num_restarts = frontends[0]._replicas.counts.restarts.total()
        is_alive = any(status.dead is None for status in frontends[0].replicas)
        named = [cause for fault in self._plan.faults for cause in causes(fault)]
        for index, history in enumerate(self._histories):
            # A request that runs alone at a death may be the cause.
            must_complete = is_alive and not (
                (self._plan.may_kill_twice or POISON in history.ask.prompt)
                and "the cause is this request" in str(history.error)
            )
            for problem in history.check(
                self._reference,
                must_complete=must_complete,
                causes=named,
                may_blame=self._plan.may_blame(history.ask),
            ):
                self._problems.append(f"request {index}: {problem}")

    async def _ask_all(self, frontends: Sequence[AsyncLLM], asks: Sequence[Ask]) -> None:
        first = len(self._histories)
        histories = [History(ask) for ask in asks]
        self._histories += histories
        tasks = [
            asyncio.create_task(self._ask(first + i, frontends[history.ask.frontend], history))
            for i, history in enumerate(histories)
        ]
        _, pending = await asyncio.wait(tasks, timeout=LIMIT_S)
        for task in pending:
            index = tasks.index(task)
            self._problems.append(f"request {first + index} never ended: {histories[index]}")
            histories[index].has_left = True
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def _ask(self, index: int, llm: AsyncLLM, history: History) -> None:
        """Be a client."""
        ask = history.ask
        if ask.starts_after is not None:
            await self._begun[ask.starts_after].wait()
        try:
            if ask.beam_width:
                history.take_beams(
                    await llm.beam_search(ask.prompt, ask.search, priority=ask.priority)
                )
                return
            name = f"ask {index}"
            stream = llm.generate(ask.prompt, ask.sampling, name, priority=ask.priority)
            async with contextlib.aclosing(stream):
                async for output in stream:
                    history.take(output)
                    self._begun[index].set()
                    if history.num_outputs == ask.leaves_after:
                        history.has_left = True
                        return
                    if history.num_outputs == ask.aborts_after:
                        await llm.abort(name)
        except EngineDeadError as error:
            if ask.frontend == self._plan.leaver and "has been shut down" in str(error):
                history.has_left = True
            else:
                history.error = error
        except RequestError as error:
            history.error = error
        finally:
            self._begun[index].set()

    async def _leave(self, frontends: Sequence[AsyncLLM]) -> None:
        """Let a frontend end, if the plan says so, when one of its requests has begun."""
        leaver = self._plan.leaver
        begun = [
            asyncio.create_task(self._begun[i].wait())
            for i, ask in enumerate(self._plan.asks)
            if ask.frontend == leaver
        ]
        if leaver is None or not begun:
            return
        try:
            await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in begun:
                task.cancel()
        frontends[leaver].shutdown()

    async def _check_leaks(self, frontends: Sequence[AsyncLLM]) -> None:
        """Note requests and blocks that the engine or a frontend still has."""
        for number, each in enumerate(frontends):
            if number != self._plan.leaver and (len(each._outputs) or each._replicas._requests):
                self._problems.append(f"frontend {number} has requests: {each._replicas!r}")

        async def stats() -> dict[int, dict[str, float]]:
            try:
                return await frontends[0].get_stats_by_replica()
            except EngineStalledError:  # it is being started again
                return {0: {"num_running": 1}}

        try:
            await until(
                stats,
                lambda replicas: (
                    not any(
                        stats.get(name, 0)
                        for stats in replicas.values()
                        for name in ("num_running", "num_waiting", "kv_cache_usage")
                    )
                ),
            )
        except EngineDeadError:
            pass
        except AssertionError as error:
            self._problems.append(f"requests or blocks have leaked: {error}")


@contextlib.contextmanager
def _own_folder() -> Iterator[Path]:
    """Let all processes make their temporary files in a folder of their own."""
    old_dir, old_variable = tempfile.tempdir, os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="faults-") as folder:
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        try:
            yield Path(folder)
        finally:
            tempfile.tempdir = old_dir
            if old_variable is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = old_variable
