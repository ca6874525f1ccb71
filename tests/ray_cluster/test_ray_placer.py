"""The placer `ray` on a cluster of two nodes of one CPU each: streams, deaths, and Ray's view."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from sidestep import LLM, AsyncLLM, EngineArgs, EngineStartError, SamplingParams, ValidationError
from sidestep.executor.runner.fake import expected_tokens
from sidestep.frontend.placement.on_ray.cluster import NAMESPACE
from sidestep.ipc.params.sampling_params import RequestOutputKind
from tests.ray_cluster.nodes import Nodes, imported_ray, ray_nodes
from tests.waiting import LIMIT_S, until

ray = imported_ray()
pytestmark = [
    # Ray's own modules warn.
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with ray_nodes(2) as nodes:
        yield nodes


@pytest.fixture(autouse=True)
def left_cluster() -> Iterator[None]:
    """Check that an engine leaves the cluster when it ends."""
    yield
    assert not ray.is_initialized()


def engine(**options: Any) -> AsyncLLM:
    return AsyncLLM.from_engine_args(
        EngineArgs(**{"device": "fake", "placer": "ray", "routing": "round_robin", **options})
    )


async def tokens_of(llm: AsyncLLM, prompt: list[int], count: int) -> list[int]:
    params = SamplingParams(
        max_tokens=count, temperature=0, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    tokens: list[int] = []
    async for output in llm.generate(prompt, params):
        tokens += output.outputs[0].token_ids
    return tokens


def expected(llm: AsyncLLM, prompt: list[int], count: int) -> list[int]:
    return expected_tokens(prompt, count, 0, llm.get_tokenizer().vocab_size)


async def until_serving(llm: AsyncLLM, number: int) -> None:
    """Return when this number of replicas serves."""

    async def serving() -> int:
        await asyncio.sleep(0.01)
        return sum(each.dead is None and each.restarting is None for each in llm.replicas)

    await until(serving, lambda count: count == number)


def actors() -> list[str]:
    """Return the sorted names of engines' actors in Ray's own list of living actors."""
    named = ray.util.list_named_actors(all_namespaces=True)
    return sorted(each["name"] for each in named if each["namespace"] == NAMESPACE)


def nodes_of_groups() -> list[set[str]]:
    """Return the nodes of each placement group that is there."""
    groups = ray.util.placement_group_table().values()
    return [
        set(group["bundles_to_node_id"].values()) for group in groups if group["state"] == "CREATED"
    ]


def process_of_actor(llm: AsyncLLM) -> psutil.Process:
    """Return the process of the actor whose agent has started the core."""
    agent = psutil.Process(llm.pids["core"]).parent()
    actor = None if agent is None else agent.parent()
    assert actor is not None and actor.cmdline()[0].startswith("ray::SidestepHost")
    return actor


async def test_streams_run_on_both_nodes_and_their_tokens_are_those_of_one_process(
    nodes: Nodes,
) -> None:
    async with engine(data_parallel_size=2, fake_step_ms=2.0) as llm:
        prompts = [[number + 1, 2, 3] for number in range(16)]
        told = await asyncio.gather(*(tokens_of(llm, prompt, 40) for prompt in prompts))
        assert told == [expected(llm, prompt, 40) for prompt in prompts]
        steps = [each["num_steps"] for each in (await llm.get_stats_by_replica()).values()]
        assert min(steps) >= 40
        names = sorted(name.split("-")[2] for name in actors())
        assert names == ["replica0", "replica1"]
        places = nodes_of_groups()
        assert [len(nodes) for nodes in places] == [1, 1] and places[0] != places[1]


async def test_a_node_that_is_removed_loses_no_stream_and_one_that_is_added_is_used(
    nodes: Nodes,
) -> None:
    async with engine(data_parallel_size=2, fake_step_ms=5.0) as llm:
        prompts = [[number + 1, 2, 3] for number in range(16)]
        tasks = [asyncio.create_task(tokens_of(llm, prompt, 200)) for prompt in prompts]
        await until(
            llm.get_stats_by_replica,
            lambda stats: (
                all(each["num_running"] >= 8 for each in stats.values())
                if len(stats) == 2
                else False
            ),
        )
        nodes.remove()
        async with asyncio.timeout(LIMIT_S):
            assert await asyncio.gather(*tasks) == [
                expected(llm, prompt, 200) for prompt in prompts
            ]
        await until_serving(llm, 1)
        nodes.add()
        await until_serving(llm, 2)
        # A core that has just started may not answer in time where others keep the processor busy.
        before = await until(llm.get_stats_by_replica, lambda stats: len(stats) == 2)
        assert await asyncio.gather(*(tokens_of(llm, prompt, 20) for prompt in prompts)) == [
            expected(llm, prompt, 20) for prompt in prompts
        ]
        after = await until(llm.get_stats_by_replica, lambda stats: len(stats) == 2)
        assert all(after[each]["num_steps"] > before[each]["num_steps"] for each in after)


async def test_two_stages_on_two_nodes_give_the_tokens_of_one_process(nodes: Nodes) -> None:
    prompts = ["def get_name(", "class Stack:", "import os\n"]
    with LLM() as llm:
        params = SamplingParams(temperature=0, max_tokens=24)
        alone = [each.outputs[0].token_ids for each in llm.generate(prompts, params)]
    options: dict[str, Any] = {"pipeline_parallel_size": 2, "ray_ranks_per_host": 1}
    async with engine(device="cpu", **options) as two:
        tokenize = two.get_tokenizer().encode
        told = [await tokens_of(two, tokenize(prompt), 24) for prompt in prompts]
        assert sorted(name.split("-")[3] for name in actors()) == ["0", "1"]
        assert [len(nodes) for nodes in nodes_of_groups()] == [2]
    assert told == alone


async def test_a_replica_whose_actor_is_killed_gets_another_actor(nodes: Nodes) -> None:
    async with engine() as llm:
        (before,) = actors()
        task = asyncio.create_task(tokens_of(llm, [1, 2, 3], 1000))
        process_of_actor(llm).kill()
        async with asyncio.timeout(LIMIT_S):
            assert await task == expected(llm, [1, 2, 3], 1000)
        (after,) = actors()
        assert before != after


async def test_replicas_share_a_node_if_no_other_has_room(nodes: Nodes) -> None:
    nodes.remove()
    try:
        async with engine(data_parallel_size=2, ray_cpus=0.5) as llm:
            await tokens_of(llm, [1], 4)
            assert len(actors()) == 2
    finally:
        nodes.add()


async def test_a_start_for_which_ray_has_no_room_says_so(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(EngineStartError, match="no host with room"):
        engine(ray_cpus=64, placer_timeout=8.0)
    assert "room for {'CPU': 64.0}" in caplog.text


def test_a_cluster_that_is_not_there_is_told_at_once() -> None:
    with pytest.raises(EngineStartError, match="ray_address"):
        engine(ray_address="127.0.0.1:9")


async def test_the_programs_own_connection_is_kept_and_labels_choose_the_node(
    nodes: Nodes,
) -> None:
    own = ray.init(address=nodes.address).address_info["node_id"]
    try:

        async def living() -> list[str]:
            await asyncio.sleep(0.05)
            return [node["NodeID"] for node in ray.nodes() if node["Alive"]]

        # Ray takes some seconds to see that a node which another test has removed is dead.
        (other,) = set(await until(living, lambda found: len({*found}) == 2)) - {own}
        async with engine(ray_labels={"ray.io/node-id": other}) as llm:
            await tokens_of(llm, [1], 4)
            assert nodes_of_groups() == [{other}]
        assert ray.is_initialized()
        with pytest.raises(ValidationError, match="ray_address"):
            engine(ray_address="local")
    finally:
        ray.shutdown()


async def test_a_replica_that_leaves_gives_its_node_back(nodes: Nodes) -> None:
    scaling: dict[str, Any] = {"max_replicas": 2, "scale_up_ttft": 0.2, "scale_down_after": 1.0}
    async with engine(fake_step_ms=20.0, max_num_seqs=4, **scaling) as llm:

        async def actors_are() -> int:
            await asyncio.sleep(0.05)
            return len(actors())

        tasks = [asyncio.create_task(tokens_of(llm, [each + 1], 60)) for each in range(60)]
        await until(actors_are, lambda count: count == 2)
        async with asyncio.timeout(LIMIT_S):
            assert await asyncio.gather(*tasks) == [
                expected(llm, [each + 1], 60) for each in range(60)
            ]
        await until(actors_are, lambda count: count == 1)

        async def groups_are() -> int:
            await asyncio.sleep(0.05)
            return len(nodes_of_groups())

        await until(groups_are, lambda count: count == 1)  # Ray ends them in its own time
