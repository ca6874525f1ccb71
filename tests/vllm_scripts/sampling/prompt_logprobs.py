# Expected: runs on cpu
import math
import sys

from vllm import LLM, SamplingParams

model, device = sys.argv[1:]
llm = LLM(model=model, device=device)
(output,) = llm.generate(
    ["def add(a, b):\n    return a + b"], SamplingParams(max_tokens=1, prompt_logprobs=1)
)
first, *rest = output.prompt_logprobs
assert first is None and len(rest) + 1 == len(output.prompt_token_ids)
total = sum(
    entry[token].logprob for token, entry in zip(output.prompt_token_ids[1:], rest, strict=True)
)
print("perplexity", math.exp(-total / len(rest)))
