"""The model of the scripted server, from the server's own tests."""

from __future__ import annotations

from tests.server.conftest import fake_model

__all__ = ["fake_model"]
