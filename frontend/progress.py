"""A bar on standard error that counts what has been done; nothing where standard error is no terminal."""

from __future__ import annotations

import tqdm


def progress_bar(total: int, unit: str) -> tqdm.tqdm:
    """Return a bar, to be used in a `with`; it leaves no line behind."""
    return tqdm.tqdm(total=total, unit=unit, disable=None, leave=False, dynamic_ncols=True)
