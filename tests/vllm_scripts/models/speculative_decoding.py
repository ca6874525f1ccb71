# Expected: runs
import sys

from vllm import LLM, SamplingParams

model, device = sys.argv[1:]
prompts = ["x = 1\ny = 2\nx = 1\ny =", "Hello"]
params = SamplingParams(temperature=0.7, seed=3, max_tokens=24)
plain = LLM(model=model, device=device).generate(prompts, params)
llm = LLM(
    model=model,
    device=device,
    speculative_config={
        "model": "ngram",
        "method": "ngram_gpu",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 3,
        "draft_tensor_parallel_size": 1,
    },
)
outputs = llm.generate(prompts, params)
assert [o.outputs[0].text for o in outputs] == [o.outputs[0].text for o in plain]
