# Expected: runs
import asyncio
import sys

from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams
from vllm.utils import random_uuid


async def answer(engine: AsyncLLMEngine, prompt: str) -> str:
    final = None
    async for output in engine.generate(
        prompt,
        SamplingParams(max_tokens=16, temperature=0),
        random_uuid(),
        lora_request=None,
        trace_headers=None,
        priority=0,
    ):
        final = output
    assert final is not None and final.finished
    return final.outputs[0].text


async def main() -> None:
    model, device = sys.argv[1:]
    args = AsyncEngineArgs(
        model=model, device=device, disable_log_requests=True, disable_log_stats=False
    )
    engine = AsyncLLMEngine.from_engine_args(args, start_engine_loop=True)
    await engine.check_health()
    tokenizer = await engine.get_tokenizer()
    assert tokenizer.eos_token_id is not None
    answers = await asyncio.gather(
        *[answer(engine, prompt) for prompt in ("import ", "import ", "class A")]
    )
    assert answers[0] == answers[1]
    print(answers)
    await engine.abort("not there")
    engine.shutdown()


asyncio.run(main())
