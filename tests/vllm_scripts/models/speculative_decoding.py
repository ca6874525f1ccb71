# Expected: ValidationError: speculative_config: speculative decoding does not exist yet
import sys

from vllm import LLM, SamplingParams

model, device = sys.argv[1:]
llm = LLM(
    model=model,
    device=device,
    speculative_config={"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3},
)
print(llm.generate("Hello", SamplingParams(max_tokens=5)))
