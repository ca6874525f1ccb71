"""`python -m sidestep.entrypoints.openai.api_server`: the same as `sidestep serve`."""

import sys

import sidestep
from sidestep.frontend.cli import main

__path__: list[str] = []  # what this module lacks is asked of the finder in sidestep/__init__.py

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]], sidestep.__version__))
