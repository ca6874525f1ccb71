"""Profiles of torch, of engines on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sidestep import SamplingParams
from tests.e2e.engines import Engines


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_profile_shows_the_operators_of_each_rank(
    ranks: int, engines: Engines, tmp_path: Path
) -> None:
    llm = engines.get(tensor_parallel_size=ranks)
    llm.start_profile(str(tmp_path))
    llm.generate("def f", SamplingParams(max_tokens=4), use_tqdm=False)
    files = llm.stop_profile()
    assert len(files) == ranks
    for file in files:
        events = json.loads(Path(file).read_text())["traceEvents"]
        names = {event.get("name") for event in events}
        assert "aten::embedding" in names
        assert all("dur" in event for event in events if event["ph"] == "X")
