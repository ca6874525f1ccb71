# Expected: runs
import sys

from vllm import LLM, SamplingParams

model, device = sys.argv[1:]
llm = LLM(model=model, device=device, scheduling_policy="priority", max_num_seqs=1)
outputs = llm.generate(["a = ", "b = ", "c = "], SamplingParams(max_tokens=8), priority=[5, 0, -5])
first = [output.metrics.first_token_ts for output in outputs]
assert first[2] < first[0], "the most urgent of those that wait runs before the least urgent"
