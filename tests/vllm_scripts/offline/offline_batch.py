# Expected: runs
import sys

from vllm import LLM, SamplingParams

model, device = sys.argv[1:]
prompts = ["def get_name(", "class Stack:", "import os\n", "for i in range("]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=12, ignore_eos=True)

if __name__ == "__main__":
    llm = LLM(model=model, device=device)
    outputs = llm.generate(prompts, sampling_params)
    assert [output.prompt for output in outputs] == prompts
    for output in outputs:
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
        assert len(output.outputs[0].token_ids) == 12
