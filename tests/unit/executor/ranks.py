"""Child of test_parallel_state: one rank's collectives.

Arguments: rank, size, rendezvous file. Prints JSON.
"""

from __future__ import annotations

import json
import logging
import sys

import torch

from sidestep.executor.parallel.parallel_state import Parallel

rank, size, rendezvous = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
parallel = Parallel(rank, size, rendezvous=rendezvous)
logging.basicConfig(format="LOG %(message)s", stream=sys.stdout)
# Without such a GPU, all ranks agree on doing without it.
memory = parallel.open_peer_memory(256, 16, torch.float32, torch.device("cuda", 1000 + rank))
print(
    json.dumps(
        {
            "minimum": parallel.minimum([70, 30][rank]),
            "sum": parallel.all_reduce(torch.tensor([1.0 + rank, 5.0])).tolist(),
            "has peers": memory is not None,
            "gathered": parallel.all_gather(torch.full((2, 1), float(rank))).tolist(),
        }
    )
)
