# Expected: runs
import sys

from vllm import LLM, SamplingParams

model, device = sys.argv[1:]
llm = LLM(model=model, device=device, disable_log_stats=False)
for output in llm.generate(["a", "b"], SamplingParams(max_tokens=5, ignore_eos=True)):
    metrics = output.metrics
    assert metrics.num_generation_tokens == 5 and metrics.first_token_latency > 0
    assert metrics.queued_ts <= metrics.first_token_ts <= metrics.last_token_ts
