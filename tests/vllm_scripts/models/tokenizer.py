# Expected: runs
import sys

from vllm import LLM, SamplingParams

model, device = sys.argv[1:]
llm = LLM(
    model=model, tokenizer=model, tokenizer_mode="auto", trust_remote_code=False, device=device
)
tokenizer = llm.get_tokenizer()

text = "def get_name(self):"
assert tokenizer(text).input_ids == tokenizer(text)["input_ids"] == tokenizer.encode(text)
assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
assert tokenizer.batch_decode([tokenizer.encode(text)], skip_special_tokens=True) == [text]
assert tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id) == tokenizer.eos_token
assert tokenizer.get_vocab()[tokenizer.eos_token] == tokenizer.eos_token_id
assert len(tokenizer) == len(tokenizer.get_vocab())

messages = [{"role": "user", "content": "Write a loop."}]
prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
assert isinstance(prompt, str) and ids == tokenizer.encode(prompt, add_special_tokens=False)
(of_text,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=4))
(of_ids,) = llm.generate({"prompt_token_ids": ids}, SamplingParams(temperature=0, max_tokens=4))
(of_chat,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=4))
assert of_text.outputs[0].token_ids == of_ids.outputs[0].token_ids == of_chat.outputs[0].token_ids
