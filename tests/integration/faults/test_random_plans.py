"""Random faults: every request is complete and exact, or ends with an error that names the cause.

`pytest tests/integration/faults --fault-plans 300` runs more plans than the suite does, and
`-k 'plan[17]'` one of them.
"""

from __future__ import annotations

import pytest

from tests.integration.faults.asks import Reference
from tests.integration.faults.plans import make_plan
from tests.integration.faults.runs import Run


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(metafunc.config.getoption("fault_plans")))


async def test_plan(seed: int, fake_model: str, reference: Reference) -> None:
    plan = make_plan(seed)
    problems = await Run(plan, fake_model, reference).run()
    assert not problems, "\n".join([*problems, str(plan)])
