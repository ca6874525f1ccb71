# Expected: runs
import sys

import numpy as np
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.inputs import TextPrompt

model, device = sys.argv[1:]
llm = LLM(model=model, device=device)
ids = llm.get_tokenizer().encode("def get_name(")
params = SamplingParams(temperature=np.float32(0), max_tokens=np.int64(6))
prompts = [
    TokensPrompt(prompt_token_ids=ids),
    {"prompt_token_ids": ids, "prompt": "def get_name("},
    {"prompt_token_ids": np.array(ids)},
    {"prompt_token_ids": [np.int32(token) for token in ids]},
    TextPrompt(prompt="def get_name("),
    "def get_name(",
]
outputs = llm.generate(prompts, params)
assert all(output.prompt_token_ids == ids for output in outputs)
assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
assert [output.prompt is None for output in outputs] == [True, False, True, True, False, False]
