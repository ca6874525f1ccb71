"""`python -m sidestep.entrypoints.openai.api_server`: the same as `sidestep serve`."""

import sys

import sidestep
from sidestep.frontend.main import main

__path__: list[
    str
] = []  # the finder in sidestep/__init__.py answers for names that this module lacks

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]], sidestep.__version__))
