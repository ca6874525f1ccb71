"""Where the snippets find their servers: run_snippets.py sets these before it imports them."""

from __future__ import annotations

MODEL = "tiny-python"
SCRIPTED = ""
"""URL of the server whose model is scripted."""
