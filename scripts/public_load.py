"""Run a public load generator against `sidestep serve`: guidellm, from the registry.

guidellm is installed in an environment of its own:

    python -m venv guidellm-env && guidellm-env/bin/pip install guidellm
    python scripts/public_load.py --guidellm guidellm-env/bin/guidellm [--requests 200]
        [--streams 32] [--serve ...]

The words after `--serve` go to `sidestep serve`. The script prints guidellm's tables; the exit
status is 1 if a request has failed or is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from sidestep.ipc.config_sections import DEFAULT_MODEL

REQUEST_FORMATS = ("/v1/completions", "/v1/chat/completions")


def run_load(
    guidellm: str, url: str, model: str, path: str, requests: int, streams: int
) -> dict[str, int]:
    """Run one load, and return the numbers of successful, errored and incomplete requests."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        subprocess.run(
            [
                guidellm,
                "run",
                "--backend",
                f"kind=openai_http,target={url},request_format={path}",
                "--profile",
                f"kind=concurrent,streams={streams}",
                "--constraint",
                f"kind=max_requests,count={requests}",
                "--tokenizer",
                f"kind=huggingface_auto,model={model}",
                "--data",
                "kind=synthetic_text,prompt_tokens=64,output_tokens=32",
                "--output",
                "kind=console",
                "--output",
                f"kind=json,path={report}",
                "--disable-progress",
            ],
            check=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        totals: dict[str, int] = json.loads(report.read_text())["benchmarks"][0]["metrics"][
            "request_totals"
        ]
    return totals


def main() -> int:
    """Run both kinds of requests against one new server."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--guidellm", default="guidellm", metavar="PROGRAM")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument(
        "--tokenizer", default=DEFAULT_MODEL, help="folder of the model's tokenizer"
    )
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[])
    args = parser.parse_args()
    server = subprocess.Popen(
        [sys.executable, "-m", "sidestep", "serve", "--port", "0", *args.serve],
        stderr=subprocess.PIPE,
        text=True,
    )
    failed = False
    try:
        assert server.stderr is not None
        url = next(
            found[1] for line in server.stderr if (found := re.match(r"serving \S+ at (\S+)", line))
        )
        for path in REQUEST_FORMATS:
            totals = run_load(args.guidellm, url, args.tokenizer, path, args.requests, args.streams)
            print(f"{path}: {totals}", flush=True)
            failed |= totals["successful"] != args.requests or totals["errored"] > 0
    finally:
        server.terminate()
        failed |= server.wait() != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
