# Expected: ModuleNotFoundError: sidestep.lora: LoRA adapters are not served yet
import sys

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

model, device = sys.argv[1:]
llm = LLM(model=model, device=device, enable_lora=True)
llm.generate("Hello", SamplingParams(), lora_request=LoRARequest("adapter", 1, "/adapters/sql"))
