"""Three ways to spend more tokens on one answer, and when each pays.

- best_of_n: when a good answer is easy to recognise; here, whether code parses.
- self_consistency: when many ways lead to one short answer, on which most of them agree.
- critique_and_revise: when the model sees its own mistakes; the small bundled model does not,
  larger ones do.
"""

import ast
import asyncio
import textwrap

from sidestep import (
    AsyncLLM,
    CompletionOutput,
    EngineArgs,
    SamplingParams,
    best_of_n,
    critique_and_revise,
    self_consistency,
)

PROMPT = '"""Users and their names."""\n\n\nclass User:\n    def get_name('
QUESTION = [{"role": "user", "content": "What does the module json do?"}]


def parses(completion: CompletionOutput) -> float:
    """Return the share of lines up to which the code is Python."""
    lines = (PROMPT + completion.text).split("\n")
    for count in range(len(lines), 0, -1):
        try:
            ast.parse(textwrap.dedent("\n".join(lines[:count])))
        except SyntaxError:
            continue
        return count / len(lines)
    return 0.0


async def main() -> None:
    """Run the three ways and print the gain of each."""
    async with AsyncLLM.from_engine_args(EngineArgs()) as llm:
        params = SamplingParams(temperature=0.9, seed=1, max_tokens=64, stop="\n\n\n")
        found = await best_of_n(llm, PROMPT, 8, parses, params)
        print(
            f"best_of_n: 8 completions parse to {sum(found.scores) / 8:.0%} on average, "
            f"the best to {max(found.scores):.0%}"
        )

        params = SamplingParams(temperature=0.7, seed=1, max_tokens=48)
        vote = await self_consistency(
            llm, QUESTION, 9, lambda text: text.split(".")[0].strip() or None, params
        )
        print(
            f"self_consistency: {vote.votes.most_common(1)[0][1]} of {vote.votes.total()} "
            f"say {vote.answer!r}; {vote.num_stopped} were stopped early"
        )

        before = await llm.get_stats()
        made = await critique_and_revise(
            llm, QUESTION, sampling_params=SamplingParams(temperature=0, max_tokens=48)
        )
        after = await llm.get_stats()
        hits, asked = (
            after[name] - before[name] for name in ("prefix_cache_hits", "prefix_cache_queries")
        )
        print(
            f"critique_and_revise: {len(made.drafts)} drafts, "
            f"{hits / asked:.0%} of their prompts were cached"
        )


asyncio.run(main())
