"""Entry point of `python -m sidestep` and the `sidestep` command."""

from __future__ import annotations

import sys

import sidestep


def main() -> int:
    """Run the command line and return the exit status."""
    from sidestep.frontend.main import main as run

    return run(version=sidestep.__version__)


if __name__ == "__main__":
    sys.exit(main())
