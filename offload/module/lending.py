"""Lends parameters: a unit is leased and its parameters are ordinary ones, until the loan is closed.

Owns who may lend: the process that made the engine, while it is open. Counting those who have been lent a unit is
:mod:`offload.module.binding`'s business. Next: :mod:`offload.module.hooks` lends to forwards.
"""

from __future__ import annotations

import os

from offload.module import refusals
from offload.module.binding import Binding
from offload.module.gradient_book import GradientBook
from offload.shards.copies import Lease
from offload.shards.manager import Manager


class Lending:
    """Lends the parameters of one engine's model. See the module's text."""

    def __init__(self, binding: Binding, book: GradientBook, manager: Manager) -> None:
        self._binding = binding
        self._book = book
        self._manager: Manager | None = manager
        self._process = os.getpid()

    def lend(self, index: int) -> Loan:
        """Lease a unit's parameters, and lend them: they are ordinary parameters until the loan is closed."""
        refusals.refuse_child(self._process)
        assert self._manager is not None, "closed"
        self._binding.refuse_replaced(index)
        self._book.show_unit(index)
        lease = self._manager.acquire(index)
        try:
            self._binding.lend(index)
        except BaseException:
            lease.close()
            raise
        return Loan(self, index, lease)

    def take_back(self, index: int) -> None:
        """Note that one of those who use a unit's parameters is done with them."""
        if self._manager is not None:  # else closed meanwhile
            self._binding.take_back(index)

    def close(self) -> None:
        """Lend no more. What is still lent is watched from now on. Idempotent."""
        for unit in self._binding.tree.units:
            if self._binding.is_lent(unit.index):  # gathered by somebody who is still at it
                self._binding.watch(unit.index)
        self._manager = None


class Loan:
    """A unit's parameters while somebody uses them: leased, and ordinary parameters."""

    __slots__ = ("_index", "_lease", "_lending")

    def __init__(self, lending: Lending, index: int, lease: Lease) -> None:
        self._lending = lending
        self._index = index
        self._lease = lease

    def close(self) -> None:
        """Take the parameters back, and return the lease."""
        try:
            self._lending.take_back(self._index)
        finally:  # a signal handler may raise, such as that of a timeout
            self._lease.close()
