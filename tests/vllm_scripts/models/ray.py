# Expected: ValidationError: distributed_executor_backend: each rank is a process of its own on this
# host
import sys

from vllm import LLM, SamplingParams

model, device = sys.argv[1:]
llm = LLM(model=model, device=device, tensor_parallel_size=2, distributed_executor_backend="ray")
print(llm.generate("Hello", SamplingParams(max_tokens=5)))
