"""Ranks over torch.distributed: groups of their own, waits that end, and one error on all of them.

Owns the groups, the words in the store, and every wait for another rank. A wait polls: it sees that the collective is
over, that another rank has failed, or that its deadline has passed. All groups are gloo over host memory, beside
whatever the user's own group is: what is exchanged is at home there. Where there are several nodes, the ranks of a node
have a group, and so have the owners of a slice. Next: :mod:`offload.distributed.exchange`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch

from offload.distributed.meshes import Members, is_mesh, members_of
from offload.distributed.ranks import Agreement, Fact, OneRank, Ranks
from offload.distributed.records import (
    RECORD_BYTES,
    Record,
    all_agree,
    detail_of,
    digest_of,
    disagreement,
    named,
    uneven,
)
from offload.distributed.words import Words
from offload.errors import ConfigError, RanksError
from offload.spans import COLLECTIVES
from offload.stats import BETWEEN_NODES, Counters
from offload.torch_private import default_store, start_all_gather, timeout_of

distributed: Any = torch.distributed

DEADLINE_S = 600.0  # after which a rank that does not come counts as lost, unless its group has a longer timeout
LOOK_S = 0.05  # between looks for words, while waiting
CENSUS_S = 0.3  # in which all who wait say where
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 50e-6, 5e-3
_CLOSED = "ranks: closed"
_TOLD = "_offload_told"  # attribute of an error: those through whom all were told of it
_PIECES, _LEAST_PIECE_BYTES = 16, 1 << 20  # of a gather: gloo has a copy of those that are on their way
_AT_A_TIME = 2  # pieces: the link has one while this rank sees that the other has come
_TRANSPORT = "gloo/transport/"  # in what gloo says of a connection
_GROUP_TIMEOUT = 4  # times the deadline: gloo's own is only for what nobody waits for any more
_LONGEST_TIMEOUT_S = 20 * 86400.0  # of gloo's own
_LONGER = "; if it is only late, pass a longer one to init_process_group, as timeout=timedelta(hours=2)"


def open_ranks(group: Any = None, *, deadline_s: float | None = None, counters: Counters | None = None) -> Ranks:
    """Return the ranks of a process group, once all of them have come.

    Args:
        group: a ``torch.distributed.ProcessGroup``, or a ``DeviceMesh`` of (ranks) or of (nodes, ranks of a node); None
            for the default group, if there is one.
        deadline_s: seconds after which a rank that does not come counts as lost; None for the timeout that the group
            was given (the default one's, for a mesh), and at least :data:`DEADLINE_S`.
        counters: of the bytes that are sent; None where nobody looks.

    Raises:
        ConfigError: this process is not in the group, the mesh is another one, or torch has no gloo.
        RanksError: a rank has not come.
    """
    if not distributed.is_available() or not distributed.is_initialized():
        return OneRank()
    members = members_of(group)
    if len(members.ranks) == 1:
        return OneRank()
    if not distributed.is_gloo_available():
        raise ConfigError("group: expected a torch with gloo, which carries host memory, but got one without it")
    if deadline_s is None:
        deadline_s = max(timeout_of(None if is_mesh(group) else group), DEADLINE_S)
    meeting = _Meeting(members, deadline_s, Counters() if counters is None else counters)
    return Processes(meeting, "control", "data")  # what is agreed on does not wait behind what is sent


class _Meeting:
    """What all threads of a rank have in common that wait for other ranks.

    Attributes:
        rank, world: of this process, and how many there are.
        nodes: how many have all slices each.
        deadline_s: after which a rank that does not come counts as lost.
        counters: of the bytes that are sent.
        words: for what no collective can tell.
        ended: text of the error that all ranks raise; None while they go on.
        left: collectives that had begun, and were not over when nobody waited for them any more; None is one of which
            that is not known.
    """

    def __init__(self, members: Members, deadline_s: float, counters: Counters) -> None:
        """Meet the others.

        Raises:
            RanksError: a rank has not come, or has other nodes.
        """
        ranks = members.ranks
        self.rank = ranks.index(distributed.get_rank())
        self.world = len(ranks)
        self.nodes = members.nodes
        self.deadline_s = deadline_s
        self.counters = counters
        self.ended: str | None = None
        self.left: list[Any] = []
        _meetings.add(self)
        name = f"offload/{hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]}"
        count = functools.partial(default_store().add, f"{name}/engines of {self.rank}")  # a new process has none
        self._store = distributed.PrefixStore(f"{name}/{count(0)}", default_store())
        self.words = Words(self._store, self.rank, self.world)
        self.words.meet(deadline_s, members.shape)
        count(1)  # not before: if the others do not come, they have not counted either
        self.words.compare_shapes()

    def connect(self, name: str, patience: int, among: Sequence[int]) -> Any:
        """Return a group `among` some ranks, for waits that are so much longer than others; to connect is none of them.

        Up to torch 2.8 it is, for a group of gloo keeps the timeout that it is made with.

        Raises:
            RanksError: another rank has ended.
        """
        kind, store = distributed.ProcessGroupGloo, distributed.PrefixStore(name, self._store)
        timeout_s, later = self.deadline_s * _GROUP_TIMEOUT, patience > 1 and hasattr(kind, "set_timeout")
        try:
            timeout = _timeout(timeout_s if later else timeout_s * patience)
            group = kind(store, among.index(self.rank), len(among), timeout)
        except RuntimeError as error:
            raise RanksError(f"ranks: expected to reach all {len(among)} but one has ended ({error})") from error
        if later:
            group.set_timeout(_timeout(timeout_s * patience))
        return group


def _timeout(seconds: float) -> timedelta:
    return timedelta(seconds=min(seconds, _LONGEST_TIMEOUT_S))


_meetings: weakref.WeakSet[_Meeting] = weakref.WeakSet()  # of this process's engines


class Processes:
    """Ranks that are processes. See the module's text.

    Attributes:
        rank: of this process.
        world: how many there are.
    """

    def __init__(
        self,
        meeting: _Meeting,
        *names: str,
        beside: bool = False,
        patience: int = 1,
        among: Sequence[int] | None = None,
        link: str = COLLECTIVES,
    ) -> None:
        """Connect with the others.

        Args:
            meeting: of all of them.
            names: of the groups: one for agreements, and one for what is sent, which may be the same.
            beside: these are for another thread than the one that computes, which waits for nobody here.
            patience: so many times the deadline of others is theirs.
            among: which of the ranks these are, of one node or one slice; None for all of them.
            link: what is sent counts as its bytes.

        Raises:
            RanksError: another rank has ended.
        """
        some = range(meeting.world) if among is None else among
        self.rank, self.world = some.index(meeting.rank), len(some)
        self._meeting = meeting
        self._words = meeting.words
        self._groups = [meeting.connect(name, patience, some) for name in names]
        self._patience = patience
        self._link = link
        self._beside: list[Processes] = []
        self._is_beside = beside
        self._node: Ranks | None = None  # where there are several
        self._owners: Ranks = OneRank()
        if among is None and meeting.nodes > 1:
            self._connect_levels(names[-1])

    def _connect_levels(self, name: str) -> None:
        """Connect the ranks of this node, and those of all nodes that have the same slice."""
        meeting = self._meeting
        local = meeting.world // meeting.nodes
        number, place = divmod(meeting.rank, local)
        self._node = OneRank()
        if local > 1:
            ranks = range(number * local, (number + 1) * local)
            self._node = self._connect_some(f"{name} in node {number}", ranks, COLLECTIVES)
        self._owners = self._connect_some(f"{name} of slice {place}", range(place, meeting.world, local), BETWEEN_NODES)

    def _connect_some(self, name: str, among: Sequence[int], link: str) -> Processes:
        some = Processes(self._meeting, name, beside=self._is_beside, patience=self._patience, among=among, link=link)
        self._beside.append(some)
        return some

    @property
    def deadline_s(self) -> float:
        """Seconds after which a rank that does not come counts as lost."""
        return self._meeting.deadline_s * self._patience

    @property
    def node(self) -> Ranks:
        """The ranks that have all slices together; see :class:`Ranks`."""
        return self if self._node is None else self._node

    @property
    def owners(self) -> Ranks:
        """The ranks of all nodes that have the same slice; see :class:`Ranks`."""
        return self._owners

    def beside(self, name: str, *, patience: int = 1) -> Processes:
        """Return the same ranks for another thread; see :meth:`Ranks.beside`."""
        other = Processes(self._meeting, name, beside=True, patience=patience)
        self._beside.append(other)
        return other

    # --- agreements -------------------------------------------------------------------------------------------------

    def agree(
        self,
        where: str,
        facts: Mapping[str, Fact] | None = None,
        *,
        numbers: Sequence[float] = (),
        error: BaseException | None = None,
        wants: int | None = None,
    ) -> Agreement:
        """Meet all ranks in one place; see :meth:`Ranks.agree`."""
        facts = facts or {}
        detail = detail_of(facts, error)
        mine = Record(where, digest_of(facts), error is not None, len(detail), tuple(numbers), wants)
        records = [Record.unpack(row) for row in self._gather_bytes(mine.pack(), RECORD_BYTES, where)]
        wanted = tuple(record.wants for record in records)
        wishes = any(wish is not None for wish in wanted)  # first: a rank that has failed takes part, too
        if wishes or all_agree(records):
            numbers_of_all = tuple(record.numbers for record in records)
            return Agreement(numbers_of_all, wanted if wishes else ())
        most = max(record.detail_bytes for record in records)
        rows = self._gather_bytes(detail, most, where)
        if error is not None:
            vars(error)[_TOLD] = self
            try:
                raise error
            finally:
                del error  # or its traceback, which has the user's tensors, would have itself
        details = [row[: record.detail_bytes] for row, record in zip(rows, records, strict=True)]
        raise RanksError(disagreement(records, details))

    def _gather_bytes(self, mine: bytes, size: int, where: str) -> list[bytes]:
        row = torch.frombuffer(bytearray(mine.ljust(max(size, 1), b"\0")), dtype=torch.uint8)
        rows = self._gather_rows(0, row, where)
        return [bytes(found.numpy()) for found in rows]

    # --- collectives ------------------------------------------------------------------------------------------------

    def gather(self, full: torch.Tensor, where: str) -> None:
        """Fill `full`, of which this rank's part is in place; see :meth:`Ranks.gather`."""
        rows = full.view(self.world, full.numel() // self.world)
        step = max(-(-rows.shape[1] // _PIECES), _LEAST_PIECE_BYTES // full.itemsize)

        def start(groups: Sequence[Any]) -> Iterator[Any]:
            for begin in range(0, rows.shape[1], step):
                pieces = list(rows[:, begin : begin + step])
                yield groups[-1].allgather([pieces], [pieces[self.rank]])

        self._run(where, start, rows[0].nbytes * (self.world - 1))

    def gather_from_all(self, mine: torch.Tensor, where: str) -> torch.Tensor:
        """Return (world, n) of each rank's (n,); see :meth:`Ranks.gather_from_all`."""
        return self._gather_rows(-1, mine, where)

    def swap(self, received: torch.Tensor, sent: torch.Tensor, where: str) -> None:
        """Send row r to rank r; see :meth:`Ranks.swap`."""
        size_bytes = sent.nbytes // self.world * (self.world - 1)
        self._run(where, lambda groups: [groups[-1].alltoall_base(received, sent, [], [])], size_bytes)

    def _gather_rows(self, group: int, mine: torch.Tensor, where: str) -> torch.Tensor:
        rows = torch.empty(self.world, mine.numel(), dtype=mine.dtype)
        size_bytes = mine.nbytes * (self.world - 1)
        self._run(where, lambda groups: [start_all_gather(groups[group], rows.view(-1), mine)], size_bytes, meets=True)
        return rows

    def serving(self, where: str) -> contextlib.AbstractContextManager[None]:
        """Do nothing: nobody wants anything of this rank that it has not been asked for; see :meth:`Ranks.serving`."""
        return contextlib.nullcontext()

    # --- waiting ----------------------------------------------------------------------------------------------------

    def _run(
        self, where: str, start: Callable[[Sequence[Any]], Iterable[Any]], size_bytes: int, *, meets: bool = False
    ) -> None:
        """Start collectives, a few at a time, and wait until all are over.

        Args:
            where: the place, for errors.
            start: starts them with the groups, each when it is asked for; they end in this order.
            size_bytes: that this rank sends.
            meets: others may come much later: its time is not that of the bytes.

        Raises:
            RanksError: another rank has failed, ended or not come; the text is the same on all.
        """
        groups, ended = self._groups, self._meeting.ended
        if ended is not None:
            raise RanksError(f"{ended} (close the engine and resume from a checkpoint)")
        begin = time.perf_counter()
        works = deque[Any]([None])  # the last one is about to begin: an interrupt may come when nobody has it yet
        try:
            for work in start(groups):
                works[-1] = work
                if len(works) == _AT_A_TIME:
                    self._wait(works[0], where)
                    works.popleft()
                works.append(None)
            works.pop()
            while works:
                self._wait(works[0], where)
                works.popleft()
        except KeyboardInterrupt as error:
            self.fail(error)
            raise
        except RanksError:
            raise
        except RuntimeError as error:  # of gloo
            told = str(error).partition("\n")[0]
            self._raise_census(where, "a connection was lost" if _TRANSPORT in told else f"gloo failed ({told})")
        finally:
            self._meeting.left.extend(work for work in works if work is None or not work.is_completed())
        end = time.perf_counter()
        counters = self._meeting.counters
        counters.add(self._link, size_bytes=size_bytes, seconds=0.0 if meets else end - begin)
        if not meets:
            counters.spans.add(COLLECTIVES, where, begin, end, size_bytes)
        if not self._is_beside:
            counters.wait_for_ranks(begin, end)

    def _wait(self, work: Any, where: str) -> None:
        begin = time.monotonic()
        deadline_s = self.deadline_s
        ask = begin + max(deadline_s - CENSUS_S, deadline_s / 2)
        look, pause = begin + LOOK_S, _SHORTEST_PAUSE_S
        while not work.is_completed():
            now = time.monotonic()
            if self._meeting.ended is not None:  # by another thread
                raise RanksError(self._meeting.ended)
            if now >= ask:
                self._raise_census(where, f"nobody came within {deadline_s:g} s", _LONGER)
            if now >= look:
                look = now + LOOK_S
                if self._is_alarmed():
                    self._answer_census(where)
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_S)
        work.wait()  # raises what gloo has

    def _is_alarmed(self) -> bool:
        try:
            return self._words.is_alarmed()
        except RuntimeError as error:
            self._end(_store_gone(error))

    # --- failures ---------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank has failed, unless they have agreed on it; see :meth:`Ranks.fail`."""
        if self._meeting.ended is None and not self.has_told(error):
            text = f"rank {self._meeting.rank}: {type(error).__name__}: {error}"
            with contextlib.suppress(RuntimeError):  # the store is gone, and with it whoever could be told
                text = self._words.fail(text)
            self._give_up(text)

    @property
    def ended(self) -> bool:
        """Whether nobody waits any more."""
        return self._meeting.ended is not None

    @property
    def unfinished(self) -> bool:
        """Whether a collective is under way that nobody waits for any more; see :class:`Ranks`."""
        return not all(work is not None and work.is_completed() for work in self._meeting.left)

    def has_told(self, error: BaseException) -> bool:
        """Tell whether an agreement has told all of an error; see :meth:`Ranks.has_told`."""
        return vars(error).get(_TOLD) is self

    def _raise_census(self, where: str, reason: str, remedy: str = "") -> NoReturn:
        """Ask all where they are, and let it be what all of them raise, with a further remedy."""
        try:
            self._words.ask(where)
            self._await_words(all_places=True)
            text = self._words.failure() or self._words.fail(self._census(reason, remedy))
        except RuntimeError as error:
            text = _store_gone(error)
        self._end(text)

    def _answer_census(self, where: str) -> NoReturn:
        """Say where this rank waits, and raise what is made of it."""
        try:
            self._words.answer(where)
            self._await_words(all_places=False)
            text = self._words.failure() or self._words.fail(self._census("who asked has ended"))
        except RuntimeError as error:
            text = _store_gone(error)
        self._end(text)

    def _await_words(self, *, all_places: bool) -> None:
        """Wait until somebody says what has failed, or (with `all_places`) until all have said where they are."""
        until = time.monotonic() + (CENSUS_S if all_places else 4 * CENSUS_S)
        while time.monotonic() < until and self._words.failure() is None:
            if all_places and len(self._words.places()) == self._meeting.world:
                return
            time.sleep(_LONGEST_PAUSE_S)

    def _census(self, reason: str, remedy: str = "") -> str:
        """Return who waits where, and of whom nothing is known."""
        places, left = self._words.places(), self._words.left()
        silent = [rank for rank in range(self._meeting.world) if rank not in places and rank not in left]
        waiting: dict[str, list[int]] = {}
        for rank, place in places.items():
            waiting.setdefault(place, []).append(rank)
        waits = ", ".join(f"{named(ranks)} waiting in {place}" for place, ranks in waiting.items())
        if left:
            waiting["engine.close()"] = left
            waits = f"{named(left)} closed the engine, {waits}"
        if not silent:
            hint = f"call the same methods on all ranks{uneven(waiting)}"
            return f"ranks: expected all in one place but {reason}: {waits}; {hint}"
        others = sum(meeting.ended is None for meeting in _meetings) - 1
        more = (
            f", perhaps in another engine: this process has {others} more, and all ranks should call "
            "engine.wait_for_ranks() before they use another one"
        )
        return (
            f"ranks: expected {named(silent)} but {reason}: no word of {named(silent)}, {waits}; see whether "
            f"{named(silent)} ended, had a batch less, computes, or waits for something else{more if others else ''}"
            f"{remedy}"
        )

    def _end(self, text: str) -> NoReturn:
        self._give_up(text)
        raise RanksError(text)

    def _give_up(self, text: str) -> None:
        """Let nobody wait any more.

        A collective that is under way stays so until gloo's own timeout. Whoever frees its group waits for that, as at
        the process's end: so the group is never freed.
        """
        self._meeting.ended = text
        self._keep_groups()

    def _keep_groups(self) -> None:
        for group in self._groups:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        self._groups = []

    def close(self) -> None:
        """Give the connections back, also those beside. Idempotent."""
        if self._meeting.ended is None and not self._is_beside:
            with contextlib.suppress(RuntimeError):  # the store is gone
                self._words.leave()
        for other in self._beside:
            other.close()
        if self._groups and self._meeting.ended not in (None, _CLOSED):  # a collective may be under way
            self._keep_groups()
        self._groups = []
        self._meeting.ended = self._meeting.ended or _CLOSED


def _store_gone(error: BaseException) -> str:
    return (
        f"ranks: expected the process group's store but it is gone ({str(error).splitlines()[0]}): the process that "
        "keeps it, rank 0 or torchrun's agent, has ended"
    )
