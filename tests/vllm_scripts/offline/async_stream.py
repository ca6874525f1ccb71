# Expected: runs
import asyncio
import sys

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM


async def main() -> None:
    model, device = sys.argv[1:]
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(model=model, device=device, enforce_eager=True)
    )
    params = SamplingParams(
        max_tokens=20, temperature=0.8, seed=42, output_kind=RequestOutputKind.DELTA
    )
    pieces = []
    try:
        async for output in engine.generate(
            request_id="stream-1", prompt="def get_name(", sampling_params=params
        ):
            pieces.append(output.outputs[0].text)
            print(pieces[-1], end="", flush=True)
            if output.finished:
                break
    finally:
        engine.shutdown()
    assert "".join(pieces)  # one piece or several: outputs merge while their reader is slow


asyncio.run(main())
