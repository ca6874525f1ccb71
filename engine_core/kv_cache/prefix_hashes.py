"""Hashes of full blocks: hash(parent's hash, the block's tokens, extra keys).

The chain makes equal hashes mean equal prefixes (the idea is that of automatic prefix caching over
paged attention, Kwon et al. 2023). The hash is SHA-256, so that no prompt can be built that
collides with another one.
"""

from __future__ import annotations

import hashlib
from array import array

from sidestep.engine_core.requests.request import Request


def extend_hashes(request: Request, full: int, block_size: int) -> None:
    """Hash the first `full` blocks of known tokens; hashes from earlier calls are kept."""
    known, size = request.blocks.hashes, block_size
    parent, new = known[-1] if known else b"", list[bytes]()
    for index in range(len(known), full):
        if index == request.num_public_tokens // size:
            parent = _salted(parent, request.cache_salt)
        tokens = array("i", request.token_ids[index * size : (index + 1) * size]).tobytes()
        parent = hashlib.sha256(parent + tokens).digest()
        new.append(parent)
    request.blocks.add_hashes(new)


def key_in_group(block_hash: bytes, group: int) -> bytes:
    """Return what the pool knows a cache group's block of these tokens by."""
    return block_hash + bytes((group,)) if group else block_hash


def _salted(parent: bytes, cache_salt: str | None) -> bytes:
    """Return the parent hash for the first block that is not public, with the salt in it.

    The salt is thereby part of every hash from that block on, so blocks are shared only if the
    salts are equal too. The salt is hashed twice, so that no salt can be made whose hash is that of
    some block.
    """
    if cache_salt is None:
        return parent
    return hashlib.sha256(parent + hashlib.sha256(cache_salt.encode()).digest()).digest()
