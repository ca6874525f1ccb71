"""Measure products with quantized matrices on this CPU, against the same product in float32.

    python benchmarks/host/cpu_coded_products.py [--threads 2] [--rows 1 8 64] [--seconds 0.5]

The layouts of executor/layers/layouts/ are based on these figures. A line has the
layout that is chosen for a form and a type of inputs, its bytes a weight, the microseconds of a
product, and how often that is the speed of float32. Matrices of one kind alternate, as layers do;
the shortest time counts, so that other programs disturb little.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from itertools import product

import torch
from torch import Tensor

from sidestep.executor.layers.linear import Linear
from sidestep.executor.models.weight_memory import weight_bytes
from sidestep.ipc.config import cache_folder_of_environment
from sidestep.kernels.native.library import keep_in
from sidestep.kernels.quantized.coded_matrix import CodedMatrix, Codes

SHAPES = ((2048, 1024), (1024, 1024), (8192, 1024), (1024, 4096), (32000, 1024))
"""Outputs and inputs: the matrices of a layer of a model with 440 million weights, and the head."""
FORMS: dict[str, tuple[Codes, int]] = {
    "int8": ("int8", 0),
    "int8 g32": ("int8", 32),
    "int4 g32": ("int4", 32),
    "int4 g128": ("int4", 128),
    "fp8": ("fp8", 0),
}
"""Name -> kind of codes, and columns that share a scale; 0 for all."""
_ALTERNATING_BYTES = 200 << 20
"""Bytes that alternating matrices hold together at least, in float32."""


def microseconds(products: Sequence[Linear], x: Tensor, seconds: float) -> float:
    """Return a shortest time of a product."""
    times: list[float] = []
    products[0](x)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 10:
        start = time.perf_counter()
        products[len(times) % len(products)](x)
        times.append(time.perf_counter() - start)
    return min(times) * 1e6


def coded(form: str, shape: tuple[int, int], dtype: torch.dtype) -> CodedMatrix:
    """Return a matrix of random codes."""
    kind, width = FORMS[form]
    rows, columns = shape
    width = width or columns
    if kind == "int4":
        codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    elif kind == "int8":
        codes = torch.randint(-127, 128, shape, dtype=torch.int8)
    else:
        codes = torch.randn(shape).to(torch.float8_e4m3fn)
    return CodedMatrix(
        kind=kind,
        codes=codes,
        scales=torch.rand(rows, columns // width) + 0.5,
        group=(1, width),
        dtype=dtype,
    )


def lines(shape: tuple[int, int], rows: Sequence[int], seconds: float) -> Iterator[str]:
    """Yield a line a form and type, the first for float32."""
    outputs, inputs = shape
    copies = max(2, min(16, _ALTERNATING_BYTES // (4 * outputs * inputs)))
    whole: dict[int, float] = {}
    for form, dtype in product(("plain", *FORMS), (torch.float32, torch.bfloat16)):
        products = [
            Linear(torch.randn(shape).to(dtype) if form == "plain" else coded(form, shape, dtype))
            for _ in range(copies)
        ]
        layout = repr(products[0]).split(", ")[1].rstrip(")")
        density = weight_bytes(products[0]) / (outputs * inputs)
        cells = []
        for count in rows:
            spent = microseconds(products, torch.randn(count, inputs).to(dtype), seconds)
            whole.setdefault(count, spent)
            cells.append(f"{spent:9.0f} us {whole[count] / spent:5.2f}x")
        name = str(dtype).removeprefix("torch.")
        yield f"  {form:<10} {name:<9} {layout:<20} {density:5.2f} B " + " ".join(cells)


@torch.inference_mode()
def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--seconds", type=float, default=0.5)
    options = parser.parse_args()
    keep_in(cache_folder_of_environment())
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"{torch.backends.cpu.get_cpu_capability()}, {options.threads} threads")
    for shape in SHAPES:
        print(f"{shape[0]} x {shape[1]}, rows {' '.join(map(str, options.rows))}", flush=True)
        for line in lines(shape, options.rows, options.seconds):
            print(line, flush=True)


if __name__ == "__main__":
    main()
