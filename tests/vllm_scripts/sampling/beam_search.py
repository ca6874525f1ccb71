# Expected: runs
import sys

from vllm import LLM
from vllm.sampling_params import BeamSearchParams

model, device = sys.argv[1:]
llm = LLM(model=model, device=device)
(output,) = llm.beam_search([{"prompt": "def get_"}], BeamSearchParams(beam_width=3, max_tokens=5))
assert len(output.sequences) == 3
for sequence in output.sequences:
    print(round(sequence.cum_logprob, 2), sequence.text)
assert output.sequences[0].cum_logprob >= output.sequences[-1].cum_logprob
