"""A progress bar on standard error; nothing if standard error is no terminal."""

from __future__ import annotations

import tqdm


def progress_bar(total: int, unit: str) -> tqdm.tqdm:
    """Return a progress bar to use in a `with`; it leaves no line behind."""
    return tqdm.tqdm(total=total, unit=unit, disable=None, leave=False, dynamic_ncols=True)
