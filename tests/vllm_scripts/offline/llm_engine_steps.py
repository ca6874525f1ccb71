# Expected: ModuleNotFoundError: sidestep.LLMEngine: there is no engine that a script steps
import sys

from vllm import EngineArgs, LLMEngine, SamplingParams

model, device = sys.argv[1:]
engine = LLMEngine.from_engine_args(EngineArgs(model=model, device=device))
engine.add_request("0", "Hello", SamplingParams(max_tokens=5))
while engine.has_unfinished_requests():
    print(engine.step())
