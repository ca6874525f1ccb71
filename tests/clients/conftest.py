"""The model of the scripted server, and defaults of the other, from the server's own tests."""

from __future__ import annotations

from tests.server.conftest import fake_model, short_answers

__all__ = ["fake_model", "short_answers"]
