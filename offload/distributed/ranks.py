"""What a rank may ask of the others, and what is true where there are none.

Owns the interface that the rest of the package sees, and the one-rank null object behind which nothing happens. Next:
:mod:`offload.distributed.processes` is the same over torch.distributed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

Fact = str | int | float | bool | None
NOTHING = 65534  # what a rank wants that takes part in what others want, and is in no place
ARRIVED = 65533  # what a rank says to its node that wants nothing of it: it is where all nodes are to meet


@dataclasses.dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks have said in one place.

    Attributes:
        numbers: what each has said, by rank.
        wanted: by rank, what each wants that has not come to the place yet; empty where all have come.
    """

    numbers: tuple[tuple[float, ...], ...]
    wanted: tuple[int | None, ...] = ()


class Ranks(Protocol):
    """The processes that train one model. Each method is called by all of them, in one order.

    What is sent comes behind an agreement that all are in one place, for gloo ends the process where two ranks send
    each other different numbers of bytes. Agreements have one size, so that ranks in different places learn of it.

    Attributes:
        rank: of this process, counted from 0.
        world: how many there are.
        deadline_s: seconds after which a rank that does not come counts as lost; 0 where none is waited for.
        ended: they have failed for good, or are closed.
        unfinished: nobody waits any more for something that has begun, but memory that it got may still be written to.
        node: the ranks that have all slices together, with this one's among them; all, unless there are several nodes.
        owners: the ranks of all nodes that have the same slice, in the order of nodes; one where there is one node.
    """

    rank: int
    world: int

    @property
    def deadline_s(self) -> float: ...  # noqa: D102

    @property
    def ended(self) -> bool: ...  # noqa: D102

    @property
    def unfinished(self) -> bool: ...  # noqa: D102

    @property
    def node(self) -> Ranks: ...  # noqa: D102

    @property
    def owners(self) -> Ranks: ...  # noqa: D102

    def agree(
        self,
        where: str,
        facts: Mapping[str, Fact] | None = None,
        *,
        numbers: Sequence[float] = (),
        error: BaseException | None = None,
        wants: int | None = None,
    ) -> Agreement:
        """Meet all ranks in one place, and compare what must be the same on all.

        Where some want something before, nothing is compared: all take part in what they want, and come again.

        Args:
            where: the place, for errors; the same on all ranks.
            facts: what must be the same on all ranks, by name.
            numbers: what the others are to know, at most :data:`offload.distributed.records.MOST_NUMBERS`.
            error: why this rank cannot go on.
            wants: what this rank wants of all before it comes to a place: a number that all understand, below
                :data:`ARRIVED`, or one of these two.

        Raises:
            RanksError: ranks are in different places or have different facts, with one text on all of them; or another
                rank cannot go on. The ranks can be used further.
            BaseException: `error`.
        """

    def gather(self, full: torch.Tensor, where: str) -> None:
        """Fill `full`: (world * n,), contiguous, of which this rank has its n elements in place.

        Raises:
            RanksError: another rank has failed, ended or not come.
        """

    def gather_from_all(self, mine: torch.Tensor, where: str) -> torch.Tensor:
        """Return what each rank has: (world, n), of `mine`: (n,).

        Raises:
            RanksError: another rank has failed, ended or not come.
        """

    def swap(self, received: torch.Tensor, sent: torch.Tensor, where: str) -> None:
        """Send row r of `sent` to rank r, whose row for this rank becomes row r of `received`.

        Args:
            received: (world, n), contiguous, overwritten.
            sent: (world, n), contiguous, of the same dtype.
            where: the place, for errors.

        Raises:
            RanksError: another rank has failed, ended or not come.
        """

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank has failed: whoever waits for it raises a :class:`RanksError`."""

    def has_told(self, error: BaseException) -> bool:
        """Tell whether all ranks know of an error of this one, from the last agreement that failed."""

    def beside(self, name: str, *, patience: int = 1) -> Ranks:
        """Return the same ranks for another thread: what they send there has an order of its own.

        Their words and their failures are one. They are closed with these. This comes right behind an agreement: who
        connects waits for the others in torch, sees no word of failure, and cannot be interrupted.

        Args:
            name: of the order, another one for each; all ranks call this in one order.
            patience: how much longer a rank may be late there.

        Raises:
            RanksError: another rank has ended.
        """

    def serving(self, where: str) -> contextlib.AbstractContextManager[None]:
        """Take part in what other ranks want, in the block, in which this one waits for them elsewhere.

        Args:
            where: the place, for errors.
        """

    def close(self) -> None:
        """Give the connections back. Idempotent."""


class OneRank:
    """The null object: one process, which agrees with itself and waits for nobody."""

    rank = 0
    world = 1
    deadline_s = 0.0
    ended = False
    unfinished = False

    @property
    def node(self) -> Ranks:
        """Itself."""
        return self

    @property
    def owners(self) -> Ranks:
        """Itself."""
        return self

    def agree(
        self,
        where: str,
        facts: Mapping[str, Fact] | None = None,
        *,
        numbers: Sequence[float] = (),
        error: BaseException | None = None,
        wants: int | None = None,
    ) -> Agreement:
        """Return what was said, or raise `error`."""
        if error is not None:
            raise error
        return Agreement((tuple(numbers),), () if wants is None else (wants,))

    def gather(self, full: torch.Tensor, where: str) -> None:
        """Do nothing: all of it is in place."""

    def gather_from_all(self, mine: torch.Tensor, where: str) -> torch.Tensor:
        """Return (1, n): a view of `mine`."""
        return mine.view(1, -1)

    def swap(self, received: torch.Tensor, sent: torch.Tensor, where: str) -> None:
        """Copy: what this rank sends is for itself."""
        received.copy_(sent)

    def fail(self, error: BaseException) -> None:
        """Do nothing: nobody waits."""

    def has_told(self, error: BaseException) -> bool:
        """Say yes: there is nobody else."""
        return True

    def beside(self, name: str, *, patience: int = 1) -> Ranks:
        """Return this one, which waits for nobody."""
        return self

    def serving(self, where: str) -> contextlib.AbstractContextManager[None]:
        """Do nothing: nobody wants anything."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Do nothing."""
