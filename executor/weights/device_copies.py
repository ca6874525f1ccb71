"""Copies of weights from files to a GPU, by several threads through pinned memory.

Tensors of a checkpoint lie in the pages of its files, which are mapped. The driver copies such
memory by one thread, after it has waited for the pages. Here each thread copies pieces into pinned
buffers of its own. The GPU's copy engine reads one buffer while the thread fills the other.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

_PIECE = 8 << 20
"""Bytes of a piece. Each thread has two buffers of this size."""
_LEAST = 1 << 20
"""Bytes of the smallest tensor that is worth being cut in pieces."""
_MOST_THREADS = 12
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types that numpy has too, by their size."""


class DeviceCopies:
    """Copies tensors to a device. Only the host's part of a copy is waited for."""

    def __init__(self, device: torch.device) -> None:
        """Start no threads yet, and none at all for a CPU."""
        self._device = device
        self._own = threading.local()
        count = min(_MOST_THREADS, torch.get_num_threads())
        self._threads = (
            ThreadPoolExecutor(count, "weights", self._begin) if device.type == "cuda" else None
        )

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return a copy of a host's tensor on the device; on a CPU, the tensor itself."""
        if self._threads is None or (source := lines_of(tensor)) is None:
            return tensor.to(self._device)
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        target = out.view(source.dtype).view(source.shape)
        stream = torch.cuda.current_stream(self._device)
        begun = stream.record_event()  # until here the memory may belong to another tensor
        copies = [
            self._threads.submit(self._copy, source[piece], target[piece], begun)
            for piece in pieces_of(source)
        ]
        for copy in copies:
            stream.wait_event(copy.result())
        return out

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.shutdown()

    def _begin(self) -> None:
        """Allocate a thread's buffers."""
        own = self._own
        torch.cuda.set_device(self._device)
        own.stream = torch.cuda.Stream()
        own.buffers = [torch.empty(_PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        own.copied = [own.stream.record_event() for _ in own.buffers]
        own.turn = 0

    @torch.inference_mode()
    def _copy(self, source: Tensor, target: Tensor, begun: torch.cuda.Event) -> torch.cuda.Event:
        """Copy a piece, in one of the threads. Return the event of its end."""
        own = self._own
        own.turn ^= 1
        own.copied[own.turn].synchronize()
        room = own.buffers[own.turn][: source.nbytes].view(source.dtype).view(source.shape)
        # torch would share a copy out among threads of its own.
        np.copyto(room.numpy(), source.numpy())
        own.stream.wait_event(begun)
        with torch.cuda.stream(own.stream):
            target.copy_(room, non_blocking=True)
        copied: torch.cuda.Event = own.stream.record_event()
        own.copied[own.turn] = copied
        return copied


def lines_of(tensor: Tensor) -> Tensor | None:
    """Return a host's tensor as integers that can be cut along the first dimension.

    They are the same memory. None for a tensor that is not worth it, or has too long lines.
    """
    if tensor.device.type != "cpu" or tensor.nbytes < _LEAST:
        return None
    whole = tensor.view(_INTEGERS[tensor.itemsize])
    if tensor.is_contiguous():
        return whole.view(-1)
    return whole if whole[0].nbytes <= _PIECE else None


def pieces_of(lines: Tensor) -> list[slice]:
    """Return the pieces of lines, each of at most as many bytes as a buffer has."""
    step = _PIECE // lines[0].nbytes
    return [slice(first, first + step) for first in range(0, len(lines), step)]
