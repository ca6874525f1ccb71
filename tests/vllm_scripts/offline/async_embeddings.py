# Expected: runs
import asyncio
import sys

from vllm import AsyncEngineArgs, AsyncLLMEngine, PoolingParams


async def main() -> None:
    model, device = sys.argv[1:]
    engine = AsyncLLMEngine.from_engine_args(
        AsyncEngineArgs(model=model, device=device, runner="pooling")
    )
    async for output in engine.encode("Hello", PoolingParams(), "request-0"):
        print(output.outputs.data)
    engine.shutdown()


asyncio.run(main())
