"""An application's backend with the engine inside: python app_backend.py [PORT], then

curl -N http://127.0.0.1:8001/complete -d 'def get_name('
"""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from sidestep import AsyncLLM, EngineArgs, RequestOutputKind, SamplingParams, ValidationError

PARAMS = SamplingParams(temperature=0.3, max_tokens=48, output_kind=RequestOutputKind.DELTA)


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    async with AsyncLLM.from_engine_args(EngineArgs()) as app.state.llm:
        yield


async def complete(request: Request) -> Response:
    prompt = (await request.body()).decode(errors="replace")
    outputs = request.app.state.llm.generate(prompt, PARAMS)
    try:
        first = await anext(outputs)  # a prompt that is refused is an answer of its own
    except ValidationError as error:
        return JSONResponse({"error": str(error)}, status_code=400)

    async def pieces() -> AsyncIterator[str]:
        # When the client goes away this is cancelled, which ends the request and frees its memory.
        yield first.outputs[0].text
        async for output in outputs:
            yield output.outputs[0].text

    return StreamingResponse(pieces(), media_type="text/plain")


app = Starlette(routes=[Route("/complete", complete, methods=["POST"])], lifespan=lifespan)

if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]) if len(sys.argv) > 1 else 8001)
