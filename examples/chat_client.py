"""Chat with a server of the OpenAI API: python chat_client.py [URL]."""

import os
import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
# A server that has no room answers 429 or 503, and when to ask again; the client does so by itself.
client = OpenAI(
    base_url=f"{url}/v1", api_key=os.environ.get("OPENAI_API_KEY", "none"), max_retries=5
)
model = client.models.list().data[0].id
messages = []
while True:
    try:
        messages.append({"role": "user", "content": input("> ")})
    except EOFError:
        break
    answer = ""
    with client.chat.completions.create(
        model=model, messages=messages, max_tokens=48, stream=True
    ) as stream:
        for chunk in stream:
            piece = chunk.choices[0].delta.content or ""
            print(piece, end="", flush=True)
            answer += piece
    print()
    messages.append({"role": "assistant", "content": answer})
