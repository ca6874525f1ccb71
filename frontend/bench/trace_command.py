"""`sidestep trace`, which runs a short load and writes a file for Perfetto."""

from __future__ import annotations

import argparse
import asyncio
import json

from sidestep.frontend.api.async_llm import AsyncLLM
from sidestep.frontend.api.event_loop import new_event_loop
from sidestep.frontend.bench.bench import print_table, random_prompts, run_batch, start_for_load
from sidestep.frontend.bench.chrome_trace import chrome_trace
from sidestep.ipc.transport.records import StepRecord


def run_trace(parsed: argparse.Namespace) -> int:
    """Run `sidestep trace` and return its exit status."""
    llm = start_for_load(parsed)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        steps = runner.run(write_trace(llm, parsed))
    print_table(summary(steps))
    print(f"{parsed.output} can be opened in ui.perfetto.dev")
    return 0


async def write_trace(llm: AsyncLLM, parsed: argparse.Namespace) -> list[StepRecord]:
    """Run the load and write the file; return its steps, of all replicas."""
    replicas = range(len(llm.replicas))
    async with llm:
        await run_batch(llm, random_prompts(llm, 2, parsed.input_len, seed=1), 8)
        warm_up = [await llm.get_step_records(replica=replica) for replica in replicas]
        known = {record.request_id for record in await llm.get_request_records()}
        await run_batch(
            llm,
            random_prompts(llm, parsed.num_prompts, parsed.input_len, seed=2),
            parsed.output_len,
        )
        steps = [
            await llm.get_step_records(
                since=before[-1].step_id + 1 if before else 0, replica=replica
            )
            for replica, before in zip(replicas, warm_up, strict=True)
        ]
        requests = [r for r in await llm.get_request_records() if r.request_id not in known]
        trace = chrome_trace(steps, requests, llm.get_deliveries())
    with open(parsed.output, "w") as file:
        json.dump(trace, file)
    return [step for of_one in steps for step in of_one]


def summary(steps: list[StepRecord]) -> dict[str, float | str]:
    """Return the figures for people."""
    busy = sum(step.end_ns - step.start_ns for step in steps)
    idle = {
        "result": sum(s.idle_result_ns for s in steps),
        "schedule": sum(s.idle_schedule_ns for s in steps),
        "prepare": sum(s.idle_prepare_ns for s in steps),
    }
    total = max(1, busy + sum(idle.values()))
    drafted = sum(step.num_draft_tokens for step in steps)
    accepted = sum(step.num_accepted_tokens for step in steps)
    return {
        "steps": len(steps),
        **({"draft_tokens": drafted, "accepted_draft_tokens": accepted} if drafted else {}),
        "device_busy_ms": busy / 1e6,
        **{f"device_idle_{cause}_ms": length / 1e6 for cause, length in idle.items()},
        "device_idle_share": sum(idle.values()) / total,
    }
