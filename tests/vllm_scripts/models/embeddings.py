# Expected: runs
import sys

from vllm import LLM

model, device = sys.argv[1:]
llm = LLM(model=model, device=device, runner="pooling")
for output in llm.embed(["Hello", "World"]):
    print(len(output.outputs.embedding))
