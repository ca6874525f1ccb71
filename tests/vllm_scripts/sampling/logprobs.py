# Expected: runs
import sys

from vllm import LLM, SamplingParams
from vllm.logprobs import Logprob

model, device = sys.argv[1:]
llm = LLM(model=model, device=device, max_logprobs=20)
(output,) = llm.generate(
    ["x = "], SamplingParams(max_tokens=5, temperature=0, logprobs=3), use_tqdm=False
)
choice = output.outputs[0]
assert len(choice.logprobs) == len(choice.token_ids) == 5
for token_id, candidates in zip(choice.token_ids, choice.logprobs, strict=True):
    chosen = candidates[token_id]
    assert isinstance(chosen, Logprob) and chosen.logprob <= 0 and 3 <= len(candidates) <= 4
    print(
        repr(chosen.decoded_token),
        chosen.rank,
        {t: round(c.logprob, 2) for t, c in candidates.items()},
    )
assert choice.cumulative_logprob <= 0
