# Expected: runs on cpu
import sys

from vllm import LLM, SamplingParams

model, device = sys.argv[1:]
llm = LLM(model=model, device=device)
tokenizer = llm.get_tokenizer()
letters = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abc"]
params = SamplingParams(
    max_tokens=12,
    allowed_token_ids=letters,
    logit_bias={letters[0]: -100.0},
    min_tokens=4,
    presence_penalty=0.5,
    frequency_penalty=0.1,
    repetition_penalty=1.05,
    top_k=50,
    min_p=0.01,
    bad_words=["b"],
    detokenize=True,
    spaces_between_special_tokens=True,
)
(output,) = llm.generate("letters: ", params)
assert set(output.outputs[0].token_ids) == {letters[2]}, output.outputs[0].text
