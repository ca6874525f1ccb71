# Expected: ValidationError: trust_remote_code: code that comes with a model is never run here
import sys

from vllm import LLM, SamplingParams

model, device = sys.argv[1:]
llm = LLM(model=model, device=device, trust_remote_code=True, max_model_len=4096)
print(llm.generate("Hello", SamplingParams(max_tokens=5)))
