# Expected: runs
import sys

from vllm import LLM, SamplingParams

model, device = sys.argv[1:]
llm = LLM(model=model, device=device, max_num_seqs=16)
(output,) = llm.generate("def main(", SamplingParams(n=4, temperature=1.0, max_tokens=10))
for choice in sorted(output.outputs, key=lambda choice: choice.index):
    print(choice.index, choice.text, choice.finish_reason)
assert [choice.index for choice in output.outputs] == [0, 1, 2, 3]
assert len({tuple(choice.token_ids) for choice in output.outputs}) > 1
