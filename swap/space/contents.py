"""All that a store knows of its bytes, under one lock.

Owns: nothing of its own; it keeps together what is changed together.
Must not know: files, transfers, manifests.
Next: `mapping` for versions, `puts` for the order of puts, `allocation` for the space.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping

from swap.space.allocation import Space
from swap.space.mapping import Version, VersionMap
from swap.space.puts import PutOrder


class Contents:
    """Which bytes hold which version of which key.

    Attributes:
        lock: the store's. It is held around every use of the other three, and guards transfers in flight, too.
        space: what is free.
        mapping: which version is current, and which is committed.
        puts: which put of a key wins.
    """

    def __init__(self, space: Space, versions: Mapping[Hashable, Version], *, explicit_commit: bool) -> None:
        """Start with committed `versions`, whose pieces `space` has given them already."""
        self.lock = threading.RLock()
        self.space = space
        self.mapping = VersionMap(space, versions, explicit_commit=explicit_commit)
        self.puts = PutOrder(keep_failures=explicit_commit)
