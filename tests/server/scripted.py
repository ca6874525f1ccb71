"""A server in the test's own process, over an engine with scripted answers.

It serves tests of behaviour that depends on the model's words.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import openai

from sidestep.frontend.input.tokenizer import Tokenizer
from sidestep.frontend.options.serve_options import Keys, ServerArgs
from sidestep.frontend.server.processes.listening import bind
from sidestep.frontend.server.processes.run import make_server
from sidestep.frontend.server.service.service import Service
from sidestep.ipc.transport.messages import AddRequest, FinishReason, unpack_ids
from tests.server.live import ANSWER_S
from tests.unit.frontend.fakes import FakeChannel, llm_of


class ScriptedEngine:
    """An engine that answers each request with the tokens of a text, one a step, then ends it."""

    def __init__(self, folder: str, says: Callable[[str], str] | None = None) -> None:
        """Script the answers.

        says: returns the answer to a prompt; without it each answer is the text `says`.
        """
        self.tokenizer = Tokenizer(folder)
        self.channel = FakeChannel()
        self.says = ""
        self._answer = says or (lambda prompt: self.says)
        self.llm = llm_of(self.channel, self.tokenizer, 2000 if says is None else 20_000)

    def prompts(self) -> list[str]:
        """Return the received prompts as text."""
        return [self._prompt(message) for message in self.channel.added]

    def _prompt(self, message: AddRequest) -> str:
        return self.tokenizer.decode(
            unpack_ids(message.prompt_token_ids).tolist(), skip_special_tokens=False
        )

    async def run(self) -> None:
        """Play the core."""
        answered = 0
        while True:
            for request in self.channel.added[answered:]:
                answered += 1
                text = self._answer(self._prompt(request))
                for token in self.tokenizer.encode(text, add_special_tokens=False):
                    self.channel.say_tokens((request.handle, token))
                    await asyncio.sleep(0)
                self.channel.say_tokens(
                    (request.handle, 0), finished=[(request.handle, FinishReason.STOP)]
                )
            await asyncio.sleep(0)


@asynccontextmanager
async def scripted_server(
    folder: str, *, says: Callable[[str], str] | None = None, **options: Any
) -> AsyncIterator[tuple[ScriptedEngine, openai.AsyncOpenAI]]:
    """Yield the engine, and a client of a server over it."""
    engine = ScriptedEngine(folder, says)
    args = ServerArgs(port=0, **options)
    listener = bind(args)
    server = make_server(Service(engine.llm, args, ("scripted",)), Keys(), "0")
    tasks = [asyncio.create_task(server.serve([listener])), asyncio.create_task(engine.run())]
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    try:
        async with openai.AsyncOpenAI(
            base_url=url, api_key="none", max_retries=0, timeout=ANSWER_S
        ) as client:
            yield engine, client
    finally:
        server.should_exit = True
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        engine.llm.shutdown()
        engine.channel.close()
