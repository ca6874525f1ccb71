"""The reference that the histories of clients are checked against."""

from __future__ import annotations

import pytest

from sidestep import EngineArgs
from tests.integration.faults.asks import Reference


@pytest.fixture(scope="session")
def reference(fake_model: str) -> Reference:
    """Return what computes the tokens that requests must get."""
    config = EngineArgs(model=fake_model, device="fake").create_engine_config()
    return Reference(fake_model, config.spec.vocab_size)
