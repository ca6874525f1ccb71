"""Before anything imports Triton: without a GPU its kernels run in its interpreter, so the same tests serve both."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
