r"""An application's backend with the engine inside, in FastAPI.

It needs FastAPI (`pip install fastapi`). Start it, and ask for a completion:

    python app_backend.py [PORT]
    curl -N http://127.0.0.1:8001/complete -H 'Content-Type: application/json' \
        -d '{"prompt": "def get_name("}'
"""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from sidestep import AsyncLLM, EngineArgs, RequestOutputKind, SamplingParams, ValidationError


class Completion(BaseModel):
    """Body of a request."""

    prompt: str
    max_tokens: int = 48


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Run the engine as long as the application."""
    async with AsyncLLM.from_engine_args(EngineArgs()) as app.state.llm:
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/complete")
async def complete(wanted: Completion) -> StreamingResponse:
    """Stream the completion of a prompt."""
    try:
        params = SamplingParams(
            temperature=0.3, max_tokens=wanted.max_tokens, output_kind=RequestOutputKind.DELTA
        )
        outputs = app.state.llm.generate(wanted.prompt, params)
        first = await anext(outputs)  # a refused prompt raises here, before the answer begins
    except ValidationError as error:
        raise HTTPException(400, str(error)) from None

    async def pieces() -> AsyncIterator[str]:
        # When the client goes away this is cancelled, which ends the request and frees its memory.
        yield first.outputs[0].text
        async for output in outputs:
            yield output.outputs[0].text

    return StreamingResponse(pieces(), media_type="text/plain")


if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]) if len(sys.argv) > 1 else 8001)
