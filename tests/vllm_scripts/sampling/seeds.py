# Expected: runs
import sys

from vllm import LLM, SamplingParams

model, device = sys.argv[1:]
prompts = ["import ", "class ", "import "]


def run(seed: int) -> list[list[int]]:
    llm = LLM(model=model, device=device, seed=seed)
    outputs = llm.generate(prompts, SamplingParams(temperature=1.0, max_tokens=8))
    seeded = llm.generate(prompts[:1] * 2, SamplingParams(temperature=1.0, max_tokens=8, seed=1234))
    assert seeded[0].outputs[0].token_ids == seeded[1].outputs[0].token_ids
    return [list(output.outputs[0].token_ids) for output in outputs]


first = run(0)
assert first[0] != first[2], "two requests of one run differ"
assert run(0) == first, "and a second run gives the same"
assert run(1) != first
