"""Measure the perplexity of the bundled model with its matrices rounded to the forms of files.

Each form is that of one or several methods (docs/quantization.md). Matrices are rounded to the
nearest code, without data, and decoded again; `sidestep eval` then measures the plain model. Tools
that calibrate lose less. The last two forms are those that `--head-quantization` rounds the output
head to, with plain layers.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors.torch import load_file, save_file

from sidestep.executor.quantization.encode import encode
from sidestep.ipc.model.quantization.weight_scheme import WeightScheme

MODEL = Path(__file__).resolve().parents[2] / "examples" / "tiny-python"
FORMS: dict[str, WeightScheme | None] = {
    "none": None,
    "fp8, a scale for each 128 x 128": WeightScheme(kind="fp8", rows=128, columns=128),
    "fp8, a scale for each matrix": WeightScheme(kind="fp8", rows=0),
    "int8, a scale for each row": WeightScheme(kind="int8"),
    "int8, groups of 32": WeightScheme(kind="int8", columns=32),
    "int4 with zeros, groups of 128": WeightScheme(kind="int4", columns=128, offset=True),
    "int4 with zeros, groups of 32": WeightScheme(kind="int4", columns=32, offset=True),
    "int4, groups of 128": WeightScheme(kind="int4", columns=128),
    "int4, groups of 32": WeightScheme(kind="int4", columns=32),
    "nf4, groups of 64": WeightScheme(kind="nf4", columns=64),
    "fp4, groups of 16": WeightScheme(kind="fp4", columns=16),
}
HEADS = {f"the head in {kind}": WeightScheme(kind=kind) for kind in ("fp8", "int8")}


def write(folder: Path, scheme: WeightScheme | None, *, head: bool) -> None:
    """Write the model with the numbers that codes stand for, of its layers or of its head."""
    shutil.copytree(MODEL, folder, dirs_exist_ok=True)
    weights = load_file(MODEL / "model.safetensors")
    if scheme is not None and head:
        # The embedding, which the head equals, keeps its own numbers.
        plain = weights["model.embed_tokens.weight"]
        weights["lm_head.weight"] = encode(plain.float(), scheme).decoded()
    elif scheme is not None:
        for name, weight in weights.items():
            if name.endswith("_proj.weight"):
                matrix = encode(weight.float(), scheme, finds_zeros=True)
                weights[name] = matrix.decoded()
    save_file(weights, folder / "model.safetensors")


def perplexity(folder: Path, text: Path) -> float:
    """Return the perplexity of a model in float32 on a CPU."""
    command = [sys.executable, "-m", "sidestep", "eval", str(folder), "--text", str(text)]
    command += ["--device", "cpu", "--dtype", "float32", "--json"]
    made = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(made.stdout)["figures"]["model"]["perplexity"]["perplexity"])


def main() -> None:
    """Print a row for each form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__))
    text = parser.parse_args().text
    plain = None
    for name, scheme in (FORMS | HEADS).items():
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), scheme, head=name in HEADS)
            found = perplexity(Path(folder), text)
        plain = found if plain is None else plain
        print(f"{name:34}{found:9.4f}{100 * (found / plain - 1):8.2f} %", flush=True)


if __name__ == "__main__":
    main()
