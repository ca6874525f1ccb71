"""Child of test_parallel_state: one rank's collectives. Arguments: rank, size, rendezvous file. Prints JSON."""

from __future__ import annotations

import json
import sys

import torch

from sidestep.executor.parallel_state import Parallel

rank, size, rendezvous = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
parallel = Parallel(rank, size, rendezvous=rendezvous)
print(json.dumps({
    "minimum": parallel.minimum([70, 30][rank]),
    "sum": parallel.all_reduce(torch.tensor([1.0 + rank, 5.0])).tolist(),
    "gathered": parallel.all_gather(torch.full((2, 1), float(rank))).tolist(),
}))
