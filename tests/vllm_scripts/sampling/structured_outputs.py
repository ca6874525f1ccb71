# Expected: runs
import json
import re
import sys

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

model, device = sys.argv[1:]
llm = LLM(model=model, device=device)


def ask(prompt: str, form: StructuredOutputsParams) -> str:
    params = SamplingParams(structured_outputs=form, max_tokens=200, temperature=0)
    return llm.generate(prompts=prompt, sampling_params=params)[0].outputs[0].text


assert ask("Is it good?", StructuredOutputsParams(choice=["Positive", "Negative"])) in (
    "Positive",
    "Negative",
)
assert re.fullmatch(
    r"[a-z]{3}@[a-z]{2}\.com",
    ask("Mail:", StructuredOutputsParams(regex=r"[a-z]{3}@[a-z]{2}\.com")),
)
schema = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "size": {"enum": [1, 2]}},
    "required": ["ok", "size"],
    "additionalProperties": False,
}
answer = json.loads(ask("As JSON:", StructuredOutputsParams(json=schema)))
assert set(answer) == {"ok", "size"}
assert ask("Say:", StructuredOutputsParams(grammar='root ::= "yes" | "no"')) in ("yes", "no")
