"""Triton's hash of its own code, which it needs before it uses its cache.

Neither this module nor Triton imports torch, so a thread can compute the hash while another one
imports torch. Triton itself is imported there too, since that takes a tenth of a second.
"""

from __future__ import annotations

import threading

_computing = threading.Lock()


def compute_key() -> None:
    """Let Triton hash its own code, which it does once in a process.

    Triton reads hundreds of megabytes for that. Most of the work does not hold the interpreter's
    lock, so a thread can do it ahead of time.
    """
    with _computing:
        from triton.runtime.cache import triton_key

        triton_key()
