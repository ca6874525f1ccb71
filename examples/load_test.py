"""Put load on a server of the OpenAI API.

    python load_test.py [URL] [REQUESTS] [REQUESTS_PER_SECOND]

Requests come at random times, like those of users, and each streams its answer. The script prints
how many failed, and how long users waited: for the first piece of an answer, and between two
pieces. `sidestep bench serve --url` has more options.
"""

import asyncio
import os
import random
import statistics
import sys
import time

from openai import AsyncOpenAI

PROMPTS = [
    "Write a function that returns the larger of two numbers.",
    "What is a stack?",
    "class Queue:",
]


async def ask(client: AsyncOpenAI, model: str, prompt: str) -> list[float]:
    """Return the seconds from the request to each piece of the answer."""
    begin, times = time.perf_counter(), []
    messages = [{"role": "user", "content": prompt}]
    async with await client.chat.completions.create(
        model=model, messages=messages, max_tokens=32, stream=True
    ) as stream:
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                times.append(time.perf_counter() - begin)
    return times


def describe(name: str, seconds: list[float]) -> str:
    """Return a line with the median and the 99th percentile."""
    cuts = (
        statistics.quantiles(seconds, n=100, method="inclusive")
        if len(seconds) > 1
        else seconds * 99
    )
    return f"{name}: p50 {cuts[49] * 1e3:.1f} ms, p99 {cuts[98] * 1e3:.1f} ms"


async def main(url: str, count: int, rate: float) -> int:
    """Send the load, print the figures, and return the exit status."""
    # Each request is sent once: a retried request would count as one that waited.
    async with AsyncOpenAI(
        base_url=f"{url}/v1", api_key=os.environ.get("OPENAI_API_KEY", "none"), max_retries=0
    ) as client:
        model = (await client.models.list()).data[0].id
        asking = []
        for number in range(count):
            asking.append(asyncio.create_task(ask(client, model, PROMPTS[number % len(PROMPTS)])))
            await asyncio.sleep(random.expovariate(rate))
        answers = await asyncio.gather(*asking, return_exceptions=True)
    # A failed request was refused, or its answer broke off.
    failures = [answer for answer in answers if isinstance(answer, BaseException)]
    times = [answer for answer in answers if isinstance(answer, list) and answer]
    print(f"{count} requests, {len(failures)} failed")
    for failure in failures[:3]:
        print(f"  {failure!r}", file=sys.stderr)
    if times:
        print(describe("first piece", [each[0] for each in times]))
        gaps = [b - a for each in times for a, b in zip(each, each[1:], strict=False)]
        print(describe("between pieces", gaps or [0.0]))
    return 1 if failures else 0


if __name__ == "__main__":
    words = [*sys.argv[1:], *["http://127.0.0.1:8000", "50", "10"][len(sys.argv) - 1 :]]
    sys.exit(asyncio.run(main(words[0], int(words[1]), float(words[2]))))
