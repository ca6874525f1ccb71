# Expected: runs
import sys

from vllm import LLM, SamplingParams

model, device = sys.argv[1:]
llm = LLM(model=model, device=device)
(free,) = llm.generate("def f(", SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
word = free.outputs[0].text[8:12]
params = SamplingParams(
    temperature=0, max_tokens=24, stop=[word], include_stop_str_in_output=False, ignore_eos=True
)
(stopped,) = llm.generate("def f(", params)
assert stopped.outputs[0].finish_reason == "stop" and stopped.outputs[0].stop_reason == word
assert word not in stopped.outputs[0].text
token = free.outputs[0].token_ids[3]
(stopped,) = llm.generate(
    "def f(", SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[token])
)
assert stopped.outputs[0].stop_reason == token
