"""The units of one model, run by an engine that is started for them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from sidestep.frontend.api.async_llm import AsyncLLM
from sidestep.frontend.api.batch import all_of
from sidestep.frontend.api.event_loop import new_event_loop
from sidestep.frontend.api.progress import progress_bar
from sidestep.frontend.cli.generate import start_engine
from sidestep.frontend.evaluation.state import State
from sidestep.frontend.evaluation.subject import Subject
from sidestep.frontend.evaluation.units import Suite, Unit, check_length
from sidestep.frontend.input.prompts import TokensPrompt
from sidestep.ipc.common.errors import ValidationError

MOST_AT_ONCE = 256
"""Prompts that the engine has at a time. More would only wait in its queue."""
OPTION = {"perplexity": "context", "needle": "needle", "json": "max_tokens", "tasks": "tasks"}
"""Option of each suite that an error about a prompt's length names."""

Plan = Sequence[tuple[Suite, list[Unit]]]
"""The units of one model by suite."""


def key_of(subject: Subject, suite: Suite, unit: Unit) -> str:
    """Return the key of a unit's result."""
    return f"{subject.role}/{suite.name}/{unit.name}"


def run_units(subject: Subject, plan: Plan, state: State) -> None:
    """Run the units whose results the state lacks; start no engine if there is none.

    The engine has ended when this returns, so that the next model finds its memory free. Raises
    SidestepError.
    """
    todo = [
        (suite, unit)
        for suite, units in plan
        for unit in units
        if key_of(subject, suite, unit) not in state.results
    ]
    if not todo:
        return
    llm = start_engine(subject.arguments)
    try:
        _check_device(subject, llm.device, state)
        for suite, unit in todo:
            # The engine may have less memory for its cache than the model has positions.
            check_length(unit, OPTION[suite.name], llm.max_model_len)
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(_run(llm, subject, todo, state))
    finally:
        llm.shutdown()


def device_of(subject: Subject, state: State) -> str:
    """Return the device that has run a model's units."""
    return str(state.results[_device_key(subject)]["device"])


def _check_device(subject: Subject, device: str, state: State) -> None:
    """Keep the device's name; raise ValidationError if the state's results are of another one."""
    if _device_key(subject) not in state.results:
        state.add(_device_key(subject), {"device": device})
    elif (before := device_of(subject, state)) != device:
        raise ValidationError("state", f"holds results of {before}, and this is {device}")


def _device_key(subject: Subject) -> str:
    return f"{subject.role}/device"


async def _run(
    llm: AsyncLLM, subject: Subject, todo: Sequence[tuple[Suite, Unit]], state: State
) -> None:
    room = asyncio.Semaphore(MOST_AT_ONCE)
    with progress_bar(len(todo), "prompt") as bar:

        async def one(suite: Suite, unit: Unit) -> None:
            async with room:
                prompt = TokensPrompt(prompt_token_ids=unit.prompt)
                async for output in llm.generate(prompt, unit.params):
                    pass
                state.add(key_of(subject, suite, unit), unit.score(output))
                bar.update()

        await all_of([one(suite, unit) for suite, unit in todo])
