"""Addresses of the snippets' servers.

run_snippets.py sets them before it imports the snippets.
"""

from __future__ import annotations

MODEL = "tiny-python"
SCRIPTED = ""
"""URL of the server whose model is scripted."""
