# Expected: ValidationError: logits_processors: are named when the engine starts
import sys

from vllm import LLM, SamplingParams


def never_zero(token_ids, logits):
    logits[0] = float("-inf")
    return logits


model, device = sys.argv[1:]
params = SamplingParams(max_tokens=5, logits_processors=[never_zero])
print(LLM(model=model, device=device).generate("Hello", params))
