"""The reference that the histories of clients are checked against."""

from __future__ import annotations

import pytest

from sidestep import EngineArgs
from sidestep.frontend.replicas import restart_budget
from tests.integration.faults.asks import Reference


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start replicas again without long pauses."""
    monkeypatch.setattr(restart_budget, "BACKOFF_S", (0.0, 0.05, 0.1))


@pytest.fixture(scope="session")
def reference(fake_model: str) -> Reference:
    """Return what computes the tokens that requests must get."""
    config = EngineArgs(model=fake_model, device="fake").create_engine_config()
    return Reference(fake_model, config.spec.vocab_size)
