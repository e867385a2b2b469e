"""The folder of the user in which small files outlive a process.

Owns where it is. Next: :mod:`offload.memory.drives` and :mod:`offload.seeing.published` have files there.
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return it; for a user without a home, a place where nothing can be kept, which all who come there bear."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "offload"
    except RuntimeError:
        return Path(os.devnull) / "offload"
