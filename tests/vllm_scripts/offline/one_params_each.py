# Expected: runs
import sys

from vllm import LLM, SamplingParams

model, device = sys.argv[1:]
llm = LLM(model=model, device=device)
base = SamplingParams(temperature=0, max_tokens=2)
longer = base.clone()
assert longer == base and longer is not base
each = [base, SamplingParams.from_optional(temperature=0, max_tokens=5, top_p=None)]
outputs = llm.generate((f"x{i} = " for i in range(2)), each, use_tqdm=False)
assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 5]
