"""Entry point of `python -m sidestep.entrypoints.openai.api_server`: `sidestep serve`."""

import sys

import sidestep
from sidestep.frontend.main import main

# The finder in sidestep/__init__.py answers for names that this module lacks.
__path__: list[str] = []

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]], sidestep.__version__))
