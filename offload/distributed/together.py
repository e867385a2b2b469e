"""One call that all ranks make: it succeeds on all of them, or all raise.

Owns when a rank's error is told to the others, so that none waits for one that does not come. Next:
:mod:`offload.checkpoints` saves and loads like this.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType

from offload.distributed.ranks import Agreement, Fact, Ranks
from offload.errors import RanksError, StateError


class Together:
    """A call of all ranks: a context manager that tells the others what its block raises.

    All ranks meet in it equally often. A rank that fails comes to the others' next meeting with its error, so they go
    on until then: what they do between two meetings is theirs alone. What the block raises of other agreements, all of
    them raise: a :class:`RanksError`, or what this rank has told there.
    """

    def __init__(self, ranks: Ranks, where: str) -> None:
        """Prepare.

        Args:
            ranks: who makes the call.
            where: the call, for errors; the same on all ranks.
        """
        self._ranks = ranks
        self._where = where
        self._is_over = False

    def meet(self, facts: Mapping[str, Fact] | None = None, numbers: Sequence[float] = ()) -> Agreement:
        """Wait for all ranks; see :meth:`Ranks.agree`.

        Raises:
            RanksError: another rank has failed, is elsewhere, or has other facts.
        """
        try:
            return self._ranks.agree(self._where, facts, numbers=numbers)
        except BaseException:
            self._is_over = True  # all of them raise
            raise

    def end(self) -> None:
        """Meet for the last time: what comes is each rank's own business.

        Raises:
            RanksError: as :meth:`meet`.
        """
        self.meet()
        self._is_over = True

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        """Send and receive in the block: a rank that fails in it is of no use to the others any more."""
        try:
            yield
        except BaseException as error:
            self._is_over = True
            if not isinstance(error, RanksError):
                self._ranks.fail(error)
            raise

    def __enter__(self) -> Together:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or self._is_over or isinstance(error, RanksError) or self._ranks.has_told(error):
            return
        self._is_over = True
        try:
            self._ranks.agree(self._where, error=error)
        except RanksError:  # there is nobody to be told, and this is why; but for a closed engine
            if isinstance(error, Exception) and not isinstance(error, StateError):
                raise
        except type(error):
            pass
