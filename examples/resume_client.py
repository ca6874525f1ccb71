"""Stream an answer that goes on after a lost connection: python resume_client.py [URL] [TEXT].

The server sends the ids of the prompt's and the answer's tokens. A client that has lost its stream
sends them all as the prompt of a completion, which goes on with the next token. Text instead of ids
could be divided into other tokens, and then the answer goes on in another way.
"""

import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from typing import Any

MAX_TOKENS = 64
MOST_TRIES = 5
HEADERS = {
    "Content-Type": "application/json",
    "Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', 'none')}",
}


def events(url: str, body: dict[str, Any]) -> Iterator[Any]:
    """Yield the choices of a stream. Raises OSError or HTTPException if it ends early."""
    data = json.dumps({**body, "stream": True, "return_token_ids": True, "temperature": 0})
    with urllib.request.urlopen(urllib.request.Request(url, data.encode(), HEADERS)) as answer:
        for line in answer:
            if line == b"data: [DONE]\n":
                return
            if line.startswith(b"data: ") and line.endswith(b"\n"):
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise ConnectionError(event["error"]["message"])
                yield from event["choices"]
    raise ConnectionError("the stream has ended early")


def answer(url: str, text: str) -> Iterator[str]:
    """Yield the pieces of an answer, each once, however often the connection is lost."""
    prompt: list[int] = []
    tokens: list[int] = []
    path = "/v1/chat/completions"
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
    for tries_left in reversed(range(MOST_TRIES)):
        wait_s = 1.0
        try:
            for choice in events(url + path, {**body, "max_tokens": MAX_TOKENS - len(tokens)}):
                prompt = prompt or choice.get("prompt_token_ids", [])
                tokens += choice.get("token_ids", [])
                yield choice.get("text") or choice.get("delta", {}).get("content") or ""
                if choice["finish_reason"] == "abort":  # the server has ended before the answer
                    raise ConnectionError("the server has ended")
                if choice["finish_reason"] is not None:
                    return
        except urllib.error.HTTPError as error:
            if error.code not in (429, 503) or not tries_left:
                raise
            wait_s = float(error.headers.get("Retry-After", 1))
        except (OSError, HTTPException):
            if not tries_left:
                raise
        if len(tokens) == MAX_TOKENS:
            return
        if tokens:
            path, body = "/v1/completions", {"prompt": prompt + tokens}
        time.sleep(wait_s)


if __name__ == "__main__":
    words = [*sys.argv[1:], *["http://127.0.0.1:8000", "def get_name("][len(sys.argv) - 1 :]]
    for piece in answer(words[0], words[1]):
        print(piece, end="", flush=True)
    print()
