# Expected: runs
import sys

from vllm import LLM, SamplingParams

model, device = sys.argv[1:]
llm = LLM(model, device=device)
conversation = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "Name a loop keyword of Python."},
]
(one,) = llm.chat(conversation, SamplingParams(max_tokens=8), use_tqdm=False)
print(one.outputs[0].text)
several = llm.chat(
    [conversation, conversation[1:]],
    sampling_params=SamplingParams(max_tokens=8),
    lora_request=None,
)
assert len(several) == 2
assert several[0].prompt_token_ids == one.prompt_token_ids != several[1].prompt_token_ids
