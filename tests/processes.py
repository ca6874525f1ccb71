"""Programs of the tests that are processes of their own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON_PATH = os.pathsep.join((str(ROOT), *filter(None, sys.path)))
"""For PYTHONPATH: they find what this process finds, wherever it is installed."""
