# Expected: AttributeError: SamplingParams is frozen: `params = params.clone(max_tokens=...)` makes
# a copy
import sys

from vllm import LLM, SamplingParams

model, device = sys.argv[1:]
params = SamplingParams(temperature=0)
params.max_tokens = 64
print(LLM(model=model, device=device).generate("Hello", params))
