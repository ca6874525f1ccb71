# Expected: runs
import sys

from vllm import LLM, SamplingParams

TEMPLATE = """{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}
{%- for message in messages %}<{{ message.role }}>{{ message.content }}</{{ message.role }}>
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% if not thinking %}no thoughts:{% endif %}{% endif %}"""

model, device = sys.argv[1:]
llm = LLM(model=model, device=device)
parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
tools = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": parameters,
        },
    }
]
messages = [{"role": "user", "content": "How is the weather in Oslo?"}]
params = SamplingParams(temperature=0, max_tokens=4)

(output,) = llm.chat(
    messages,
    params,
    tools=tools,
    chat_template=TEMPLATE,
    chat_template_kwargs={"thinking": False},
    chat_template_content_format="auto",
)
assert (
    output.prompt == "[get_weather]<user>How is the weather in Oslo?</user><assistant>no thoughts:"
), output.prompt

messages.append({"role": "assistant", "content": "It is"})
(output,) = llm.chat(
    messages,
    params,
    chat_template=TEMPLATE,
    add_generation_prompt=False,
    continue_final_message=True,
)
assert output.prompt == "<user>How is the weather in Oslo?</user><assistant>It is", output.prompt
