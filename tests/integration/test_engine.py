"""The whole engine on the fake device.

The output equals the script's, whatever runs beside it.
"""

import asyncio
import gc
import itertools
import json
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from sidestep import AsyncLLM, RequestError, RequestOutputKind, SamplingParams
from sidestep.executor.runner.fake import expected_tokens
from sidestep.frontend.main import main
from tests.waiting import until, until_idle, until_stats

MakeLLM = Callable[..., AsyncLLM]


async def tokens_of(
    llm: AsyncLLM, prompt: list[int], params: SamplingParams, **options: Any
) -> list[int]:
    tokens: list[int] = []
    async for out in llm.generate(prompt, params, **options):
        tokens = list(out.outputs[0].token_ids)
    return tokens


def params_of(count: int, seed: int = 5, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, seed=seed, ignore_eos=True, **more)


@pytest.mark.parametrize("overlap", [True, False])
async def test_many_requests_give_their_own_tokens(make_llm: MakeLLM, overlap: bool) -> None:
    llm = make_llm(
        async_scheduling=overlap,
        max_num_seqs=8,
        num_kv_blocks=40,
        max_model_len=256,
        max_num_batched_tokens=32,
        tensor_parallel_size=2,
    )
    vocab = llm.get_tokenizer().vocab_size
    prompts = [[1 + (7 * i + j) % 200 for j in range(1 + 5 * i)] for i in range(24)]
    got = await asyncio.gather(
        *(tokens_of(llm, p, params_of(10 + i, seed=i)) for i, p in enumerate(prompts))
    )
    for i, (prompt, tokens) in enumerate(zip(prompts, got, strict=True)):
        assert tokens == expected_tokens(prompt, 10 + i, i, vocab), f"request {i}"
    await until_idle(llm)


async def test_a_batch_begins_with_one_step_for_all_prompts(make_llm: MakeLLM) -> None:
    llm = make_llm()
    prompts = [[1 + (7 * i + j) % 200 for j in range(20)] for i in range(8)]
    await asyncio.gather(*(tokens_of(llm, prompt, params_of(3)) for prompt in prompts))
    await until_idle(llm)
    first, *others = await llm.get_step_records()
    assert (first.num_rows, first.num_tokens) == (8, 160)
    assert len(others) == 2 and all(record.num_rows == 8 for record in others)


async def test_a_repeated_prompt_is_taken_from_the_cache_until_it_is_reset(
    make_llm: MakeLLM,
) -> None:
    llm = make_llm()
    prompt = list(range(1, 101))

    async def cached() -> int:
        async for out in llm.generate(prompt, params_of(1)):
            pass
        return out.num_cached_tokens or 0

    assert [await cached(), await cached()] == [0, 96]
    assert await llm.reset_prefix_cache()
    assert await cached() == 0


async def test_salts_keep_caches_apart(make_llm: MakeLLM) -> None:
    llm = make_llm()
    prompt = list(range(1, 101))
    seen = []
    for salt in ("a", "b", "a", None):
        async for out in llm.generate(prompt, params_of(1), cache_salt=salt):
            pass
        seen.append(out.num_cached_tokens)
    assert seen == [0, 0, 96, 0]


async def test_leaving_the_loop_ends_the_request_and_frees_its_blocks(make_llm: MakeLLM) -> None:
    llm = make_llm(fake_step_ms=1.0)
    async with aclosing(llm.generate([1, 2, 3], params_of(2000))) as outputs:
        async for _ in outputs:
            break
    await until_idle(llm)


async def test_dropping_the_generator_ends_the_request_too(make_llm: MakeLLM) -> None:
    llm = make_llm(fake_step_ms=1.0)
    outputs = llm.generate([1, 2, 3], params_of(2000))
    await anext(outputs)
    del outputs
    gc.collect()
    await until_idle(llm)


async def test_cancelling_the_task_ends_the_request_and_no_other(make_llm: MakeLLM) -> None:
    llm = make_llm(fake_step_ms=1.0)
    victim = asyncio.create_task(tokens_of(llm, [1, 2, 3], params_of(2000)))
    await until_stats(llm, num_running=1)
    bystander = llm.generate([4, 5, 6], params_of(200))
    await anext(bystander)
    victim.cancel()
    async for out in bystander:
        pass
    assert len(out.outputs[0].token_ids) == 200
    with pytest.raises(asyncio.CancelledError):
        await victim
    await until_idle(llm)


async def test_abort_by_id_ends_the_stream_with_a_reason(make_llm: MakeLLM) -> None:
    llm = make_llm(fake_step_ms=5.0)
    last = None
    async for out in llm.generate([1, 2, 3], params_of(2000), "mine"):
        if not out.finished and last is None:
            await llm.abort("mine")
        last = out
    assert last is not None and last.finished and last.outputs[0].finish_reason == "abort"
    await until_idle(llm)


async def test_a_deadline_ends_a_request_with_a_reason(make_llm: MakeLLM) -> None:
    llm = make_llm(fake_step_ms=5.0)
    async for out in llm.generate([1, 2, 3], params_of(2000), deadline_s=0.1):
        pass
    assert out.finished
    assert (out.outputs[0].finish_reason, out.outputs[0].stop_reason) == ("abort", "deadline")


async def test_a_low_priority_number_goes_first(make_llm: MakeLLM) -> None:
    llm = make_llm(scheduling_policy="priority", max_num_seqs=1, fake_step_ms=2.0)
    order: list[str] = []

    async def run(name: str, priority: int) -> None:
        await tokens_of(llm, [1, 2, 3], params_of(20), priority=priority)
        order.append(name)

    async with aclosing(llm.generate([1, 2, 3], params_of(2000))) as first:
        await anext(first)
        others = [asyncio.create_task(run(*each)) for each in (("late", 9), ("urgent", 1))]
        await until_stats(llm, num_waiting=2)
        assert order == []
    await asyncio.gather(*others)
    assert order == ["urgent", "late"]


async def test_what_can_never_fit_is_refused_and_the_others_go_on(make_llm: MakeLLM) -> None:
    llm = make_llm(num_kv_blocks=8, max_model_len=128)
    good = asyncio.create_task(tokens_of(llm, [1, 2, 3], params_of(20)))
    with pytest.raises((RequestError, ValueError), match="prompt"):
        await tokens_of(llm, [1] * 500, params_of(1))
    assert len(await good) == 20


async def test_final_only_gives_one_output_with_everything(make_llm: MakeLLM) -> None:
    llm = make_llm()
    outs = [
        out
        async for out in llm.generate(
            [1, 2, 3], params_of(30, output_kind=RequestOutputKind.FINAL_ONLY)
        )
    ]
    assert len(outs) == 1 and outs[0].finished and len(outs[0].outputs[0].token_ids) == 30


@pytest.mark.parametrize("most", [0, 2])
async def test_each_token_has_as_many_logprobs_as_asked_for(make_llm: MakeLLM, most: int) -> None:
    params = SamplingParams(max_tokens=5, logprobs=most, ignore_eos=True)
    async for out in make_llm().generate([1, 2, 3], params):
        pass
    (completion,) = out.outputs
    assert completion.logprobs is not None and len(completion.logprobs) == 5
    for token, entries in zip(completion.token_ids, completion.logprobs, strict=True):
        assert token in entries
        assert most <= len(entries) <= most + 1


async def test_several_engines_live_in_one_process(make_llm: MakeLLM) -> None:
    one, two = make_llm(), make_llm()
    vocab = one.get_tokenizer().vocab_size
    got = await asyncio.gather(
        tokens_of(one, [1, 2], params_of(9)), tokens_of(two, [1, 2], params_of(9))
    )
    assert list(got) == [expected_tokens([1, 2], 9, 5, vocab)] * 2


async def test_the_next_step_is_scheduled_and_prepared_while_one_runs(make_llm: MakeLLM) -> None:
    """With overlap the device never waits for the host, as the flight recorder shows."""
    llm = make_llm(fake_step_ms=50)
    await asyncio.gather(*(tokens_of(llm, [1 + i, 2, 3], params_of(12)) for i in range(4)))
    steps = await llm.get_step_records()
    assert [step.step_id for step in steps] == list(range(len(steps)))
    assert all(
        s.ready_ns
        <= s.schedule_ns
        <= s.submit_ns
        <= s.received_ns
        <= s.launched_ns
        <= s.end_ns
        <= s.taken_ns
        <= s.told_ns
        for s in steps
    )
    assert all(s.end_ns - s.start_ns >= 50e6 - 1e3 for s in steps)
    running = steps[2:-2]
    under = sum(
        before.start_ns <= step.launched_ns <= before.end_ns
        for before, step in itertools.pairwise(running)
    )
    assert under >= 0.8 * (len(running) - 1), "a step is launched while the one before it runs"
    stats = await llm.get_stats()
    assert stats["device_busy_s"] == pytest.approx(sum(s.end_ns - s.start_ns for s in steps) / 1e9)
    assert stats["device_idle_s"] == pytest.approx(sum(s.idle_ns for s in steps) / 1e9)
    assert sum(s.num_sampled for s in steps) == 48 and sum(s.num_entered for s in steps) == 4


async def test_without_overlap_the_device_waits_and_the_records_say_for_what(
    make_llm: MakeLLM,
) -> None:
    llm = make_llm(fake_step_ms=5, async_scheduling=False)
    await tokens_of(llm, [1, 2, 3], params_of(10))
    first, *steps = await llm.get_step_records()
    assert first.idle_ns == 0
    assert all(
        s.idle_result_ns > 0 and s.idle_schedule_ns > 0 and s.idle_prepare_ns > 0 for s in steps
    )
    await tokens_of(llm, [1, 2, 3], params_of(1))
    (last,) = await llm.get_step_records(since=steps[-1].step_id + 1)
    assert last.idle_no_work_ns > 0 and last.idle_result_ns == 0


async def test_requests_can_be_looked_at_while_they_run(make_llm: MakeLLM) -> None:
    llm = make_llm(fake_step_ms=5, max_num_seqs=1)
    async with aclosing(llm.generate([1, 2, 3], params_of(2000), "first")) as first:
        await anext(first)
        second = asyncio.create_task(tokens_of(llm, [4, 5], params_of(1), request_id="second"))
        found = await until(llm.get_request_records, lambda each: len(each) == 2)
        records = {r.request_id: r for r in found}
        assert (records["first"].status, records["second"].waiting_for) == (
            "running",
            "max_num_seqs",
        )
    await second
    ended = {r.request_id: r for r in await llm.get_request_records()}
    assert (ended["first"].finish_reason, ended["second"].finish_reason) == ("abort", "length")
    assert ended["second"].finished_ns is not None and ended["second"].num_output_tokens == 1


def test_a_trace_is_written_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.json"
    assert (
        main(
            [
                "trace",
                "--device",
                "fake",
                "--fake-step-ms",
                "3",
                "--num-prompts",
                "3",
                "--input-len",
                "4",
                "--output-len",
                "5",
                "--output",
                str(file),
            ]
        )
        == 0
    )
    events = json.loads(file.read_text())["traceEvents"]
    steps = [e for e in events if e["ph"] == "X" and e["name"].startswith("step ")]
    assert sum(e["args"]["sampled"] for e in steps) == 15 and all(e["dur"] >= 2999 for e in steps)
    assert len([e for e in events if e["ph"] == "b" and e["name"] == "output"]) == 3
    printed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[:-1])
    assert int(printed["steps"]) == len(steps) and 0 <= float(printed["device_idle_share"]) < 1


@pytest.mark.parametrize("deadline_s", [1e7, 1e12, 1e300])
async def test_a_deadline_in_the_distant_future_is_none(
    make_llm: MakeLLM, deadline_s: float
) -> None:
    llm = make_llm()
    params = SamplingParams(max_tokens=3, seed=1, ignore_eos=True)
    async for output in llm.generate([1, 2], params, deadline_s=deadline_s):
        pass
    assert len(output.outputs[0].token_ids) == 3
    await llm.check_health()
