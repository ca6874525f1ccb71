import asyncio

from sidestep import AsyncLLM, EngineArgs, RequestOutputKind, SamplingParams


async def main() -> None:
    async with AsyncLLM.from_engine_args(EngineArgs()) as llm:
        params = SamplingParams(temperature=0.3, max_tokens=48, output_kind=RequestOutputKind.DELTA)
        async for output in llm.generate("def get_name(", params):
            print(output.outputs[0].text, end="", flush=True)
    print()


asyncio.run(main())
