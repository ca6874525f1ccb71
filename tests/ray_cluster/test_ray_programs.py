"""Programs on a Ray cluster: a user's own, a Ray Serve deployment, and the server."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidestep import LLM, SamplingParams
from tests.pages import of_sidestep, with_variables
from tests.processes import ROOT, run
from tests.ray_cluster.nodes import Nodes, imported_ray, ray_nodes
from tests.server.live import LiveServer

imported_ray()
EXAMPLES = (ROOT / "examples" / "README.md").read_text()
(PROGRAM,) = re.findall(r"```python\n(.*?)```", EXAMPLES, re.DOTALL)


@pytest.fixture(scope="module", autouse=True)
def nodes() -> Iterator[Nodes]:
    with ray_nodes(2) as nodes:
        yield nodes


def test_a_users_program_has_the_engine_in_an_actor(tmp_path: Path) -> None:
    assert len([line for line in PROGRAM.splitlines() if line]) <= 20
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run(sys.executable, "program.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with LLM() as llm:
        prompts = ["def get_name(", "class Stack:", "import os\n"]
        texts = llm.generate(prompts, SamplingParams(temperature=0))
    written = [prompt + each.outputs[0].text for prompt, each in zip(prompts, texts, strict=True)]
    assert done.stdout == "\n\n".join(written) + "\n"


def test_a_deployment_of_ray_serve_measures_the_way_through_it() -> None:
    pytest.importorskip("ray.serve")
    done = run(
        *(sys.executable, ROOT / "examples" / "ray_serve.py", "--measure", "2", "--tokens", "20"),
        *("--device", "fake", "--data-parallel-size", "2"),
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("      2")]
    assert [row[1] for row in rows] == ["direct", "handle", "HTTP"]
    assert all(float(cell) > 0 for row in rows for cell in row[2:])


@pytest.mark.parametrize("command", of_sidestep("cluster-ray.md"))
def test_a_server_of_the_page_serves_from_the_nodes_and_ends_in_order(command: str) -> None:
    """Ray's handler of SIGTERM would end the program at once, and with another status."""
    words = with_variables(command)[1]
    words[words.index("--data-parallel-size") + 1] = "2"  # the cluster has two nodes
    with LiveServer(*words[1:], "--device", "fake") as server:
        body = {"prompt": [1, 2, 3], "max_tokens": 8, "ignore_eos": True, "temperature": 0}
        answers = [server.post("/v1/completions", body) for _ in range(4)]
        assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
        assert server.close() == 0
