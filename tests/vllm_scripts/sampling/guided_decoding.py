# Expected: ModuleNotFoundError: sidestep.sampling_params.GuidedDecodingParams: use
# StructuredOutputsParams
import sys

from vllm import LLM, SamplingParams
from vllm.sampling_params import GuidedDecodingParams

model, device = sys.argv[1:]
params = SamplingParams(guided_decoding=GuidedDecodingParams(choice=["yes", "no"]))
print(LLM(model=model, device=device).generate("Sure?", params))
