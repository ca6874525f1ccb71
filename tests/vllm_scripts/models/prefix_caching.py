# Expected: runs
import sys

from vllm import LLM, SamplingParams

model, device = sys.argv[1:]
llm = LLM(model=model, device=device, enable_prefix_caching=True, block_size=16)
shared = "# The names of all people in the house are listed here.\n" * 4
params = SamplingParams(temperature=0, max_tokens=4)
(first,) = llm.generate(shared + "name = ", params)
(second,) = llm.generate(shared + "other = ", params)
assert first.num_cached_tokens == 0 and second.num_cached_tokens >= 16
assert llm.reset_prefix_cache()
assert llm.generate(shared + "other = ", params)[0].num_cached_tokens == 0
