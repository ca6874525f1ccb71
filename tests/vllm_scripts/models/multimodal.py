# Expected: ValidationError: multi_modal_data: only text goes into a model here
import sys

from vllm import LLM, SamplingParams

model, device = sys.argv[1:]
llm = LLM(model=model, device=device)
print(
    llm.generate(
        {"prompt": "USER: <image>\nWhat is this?", "multi_modal_data": {"image": object()}},
        SamplingParams(max_tokens=5),
    )
)
