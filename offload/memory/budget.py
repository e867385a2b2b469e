"""Memory tiers, and who has claimed what of them.

Owns the budgets, which are hard ledgers. Knows bytes and names of claims; must not know what the bytes are for. Next:
:mod:`offload.memory.arena` takes memory, :mod:`offload.shards.tiers` claims it.
"""

from __future__ import annotations

import threading
from enum import Enum

from offload.errors import BudgetError
from offload.sizes import format_bytes


class Tier(Enum):
    """Where bytes live, ordered by distance from compute."""

    DEVICE = "device"
    HOST = "cpu"
    NVME = "nvme"

    # Members are singletons: identity is enough, and this keeps dictionary lookups off the interpreter.
    __hash__ = object.__hash__


class Budget:
    """Hard byte limit of one tier, with a ledger of claims. Safe from several threads.

    Invariant: used == sum of claims <= limit.
    """

    def __init__(self, tier: Tier, limit_bytes: int) -> None:
        self.tier = tier
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0
        self._used_bytes = 0
        self._held: dict[str, int] = {}  # by the names of claims
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes claimed now."""
        return self._used_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that can still be claimed."""
        return self.limit_bytes - self._used_bytes

    def claim(self, name: str, size_bytes: int = 0) -> Claim:
        """Claim `size_bytes` under `name`; the claim exists before the bytes do.

        Raises:
            BudgetError: the claim does not fit. Nothing is claimed then.
        """
        claim = Claim(self, name)
        claim.resize(size_bytes)
        return claim

    def claims(self) -> dict[str, int]:
        """Return the bytes claimed by name."""
        with self._lock:
            return {name: size for name, size in self._held.items() if size}

    def _add(self, name: str, by_bytes: int) -> bool:
        with self._lock:
            wanted = self._used_bytes + by_bytes
            if by_bytes > 0 and wanted > self.limit_bytes:
                return False
            self._used_bytes = wanted
            self._held[name] = self._held.get(name, 0) + by_bytes
            if wanted > self.peak_bytes:
                self.peak_bytes = wanted
            return True

    def _refusal(self, name: str, by_bytes: int) -> BudgetError:
        holders = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.claims().items())
        return BudgetError(
            f"{self.tier.value} budget: {name} needs {format_bytes(by_bytes)} more, "
            f"{format_bytes(self._used_bytes + by_bytes)} in all, but the limit is {format_bytes(self.limit_bytes)} "
            f"(held: {holders or 'nothing'}); "
            f'raise max_memory["{self.tier.value}"]'
        )


class Claim:
    """Bytes of a budget that one owner holds, given back by :meth:`close` or at the end of a ``with`` block.

    Attributes:
        budget: of which.
        name: what error messages call it; several claims may have the same.
        size_bytes: held now.
    """

    __slots__ = ("budget", "name", "size_bytes")

    def __init__(self, budget: Budget, name: str) -> None:
        self.budget = budget
        self.name = name
        self.size_bytes = 0

    def resize(self, size_bytes: int) -> None:
        """Hold `size_bytes` from now on.

        Raises:
            BudgetError: they do not fit. The claim is as it was then.
        """
        assert size_bytes >= 0, f"{self.name}: {size_bytes} bytes"
        if not self.grow(size_bytes - self.size_bytes):
            raise self.budget._refusal(self.name, size_bytes - self.size_bytes)

    def grow(self, by_bytes: int) -> bool:
        """Hold so much more, if it fits; returns whether it does."""
        fits = self.budget._add(self.name, by_bytes)
        if fits:
            self.size_bytes += by_bytes
        return fits

    def close(self) -> None:
        """Hold nothing any more. Idempotent."""
        self.resize(0)

    def __enter__(self) -> Claim:
        """Return the claim."""
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
