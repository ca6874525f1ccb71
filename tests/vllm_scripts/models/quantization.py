# Expected: runs on cpu
import sys

from vllm import LLM, SamplingParams

model, device = sys.argv[1:]
llm = LLM(model=model, device=device, quantization="fp8")
print(llm.generate("Hello", SamplingParams(max_tokens=5)))
