# Expected: ValidationError: quantization: quantized weights are not served yet
import sys

from vllm import LLM, SamplingParams

model, device = sys.argv[1:]
llm = LLM(model=model, device=device, quantization="fp8", kv_cache_dtype="fp8")
print(llm.generate("Hello", SamplingParams(max_tokens=5)))
